"""The methods, one file each. This table is the only registry: a new method is a file and a
line here.
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.aggregators.robust import ROBUST
from remanence.algorithms.centralised import centralised
from remanence.algorithms.dac import dac
from remanence.algorithms.dp import dp
from remanence.algorithms.dp_counts import dp_counts
from remanence.algorithms.dp_sgd import dp_sgd
from remanence.algorithms.fedavg import fedavg
from remanence.algorithms.fedbabu import fedbabu
from remanence.algorithms.fedbn import fedbn
from remanence.algorithms.feddf import feddf
from remanence.algorithms.feddrift import feddrift
from remanence.algorithms.fednova import fednova
from remanence.algorithms.fedntd import fedntd
from remanence.algorithms.fedprox import fedprox
from remanence.algorithms.fedreg import fedreg
from remanence.algorithms.fedwavg import fedwavg
from remanence.algorithms.flashback import flashback
from remanence.algorithms.frozen_head import frozen_head
from remanence.algorithms.gossip import local, oracle, random
from remanence.algorithms.hast import hast
from remanence.algorithms.moon import moon
from remanence.algorithms.scaffold import scaffold
from remanence.algorithms.server_optimisers import fedadagrad, fedadam, fedavgm, fedyogi
from remanence.objectives import OBJECTIVES
from remanence.types import Part

__all__ = [
    "METHODS",
    "PARTS",
    "centralised",
    "dac",
    "dp",
    "dp_counts",
    "dp_sgd",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "feddf",
    "feddrift",
    "fednova",
    "fedntd",
    "fedprox",
    "fedreg",
    "fedwavg",
    "fedyogi",
    "flashback",
    "frozen_head",
    "hast",
    "local",
    "moon",
    "oracle",
    "random",
    "scaffold",
]

METHODS: dict[str, Callable[..., Part]] = {
    "centralised": centralised,
    "dac": dac,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedbabu": fedbabu,
    "fedbn": fedbn,
    "feddf": feddf,
    "feddrift": feddrift,
    "fednova": fednova,
    "fedntd": fedntd,
    "fedprox": fedprox,
    "fedreg": fedreg,
    "fedwavg": fedwavg,
    "fedyogi": fedyogi,
    "flashback": flashback,
    "frozen_head": frozen_head,
    "hast": hast,
    "local": local,
    "moon": moon,
    "oracle": oracle,
    "random": random,
    "scaffold": scaffold,
}

PRIVACY: dict[str, Callable[..., Part]] = {"dp": dp, "dp_counts": dp_counts, "dp_sgd": dp_sgd}

# whatever may stand between two `+`
PARTS: dict[str, Callable[..., Part]] = METHODS | OBJECTIVES | ROBUST | PRIVACY
