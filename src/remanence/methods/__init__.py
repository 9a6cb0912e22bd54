"""The methods, one file each.

    one global model    fedavg, fedprox, scaffold, feddyn, fednova, moon, fedntd, fedreg, fedwavg,
                        feddf, flashback, frozen_head, server_optimizers
    personal models     fedbn, fedbabu
    several models      feddrift
    without a server    dac, hast, gossip
    one place           centralized

`METHODS` is the only registry. A new method is a file, and here its import, its name in `__all__`
and its entry in `METHODS`. `PARTS` holds everything that can be joined by `+`: methods, losses,
robust aggregators and privacy parts. A method imports from `core` and from the parts that methods
share (aggregators, losses, optimizers, peers, privacy), never from what runs it. Begin with
`fedprox`, the smallest, and `scaffold`, which fills many slots.
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.aggregators.robust import ROBUST
from remanence.core.slots import Part
from remanence.losses import LOSSES
from remanence.methods.centralized import centralized
from remanence.methods.dac import dac
from remanence.methods.fedavg import fedavg
from remanence.methods.fedbabu import fedbabu
from remanence.methods.fedbn import fedbn
from remanence.methods.feddf import feddf
from remanence.methods.feddrift import feddrift
from remanence.methods.feddyn import feddyn
from remanence.methods.fednova import fednova
from remanence.methods.fedntd import fedntd
from remanence.methods.fedprox import fedprox
from remanence.methods.fedreg import fedreg
from remanence.methods.fedwavg import fedwavg
from remanence.methods.flashback import flashback
from remanence.methods.frozen_head import frozen_head
from remanence.methods.gossip import local, oracle, random
from remanence.methods.hast import hast
from remanence.methods.moon import moon
from remanence.methods.scaffold import scaffold
from remanence.methods.server_optimizers import fedadagrad, fedadam, fedavgm, fedyogi
from remanence.privacy.client_dp import dp
from remanence.privacy.dp_sgd import dp_sgd
from remanence.privacy.label_dp import dp_counts

__all__ = [
    "METHODS",
    "PARTS",
    "PRIVACY",
    "centralized",
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
    "feddyn",
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
    "centralized": centralized,
    "dac": dac,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedbabu": fedbabu,
    "fedbn": fedbn,
    "feddf": feddf,
    "feddrift": feddrift,
    "feddyn": feddyn,
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

# all parts by name
PARTS: dict[str, Callable[..., Part]] = METHODS | LOSSES | ROBUST | PRIVACY


def __dir__() -> list[str]:
    """The names of an experiment alone, for completion."""
    return sorted(__all__)
