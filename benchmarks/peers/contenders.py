"""Who takes part: ourselves, the plain loop, and the simulators that PyPI offers, each with the
environment it runs in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remanence.core.errors import unknown


@dataclass(frozen=True)
class Contender:
    """One line of the table."""

    name: str
    driver: str  # a file beside this one
    about: str
    environment: str = ""  # a file of `pins`; empty: the interpreter that runs us
    settings: Mapping[str, str] = field(default_factory=dict)  # variables of its environment


OURS = Contender("remanence", "ours_job.py", "this package, engine `auto`")
PLAIN = Contender(
    "plain loop", "plain_job.py", "PyTorch and nothing else, client after client, data in memory"
)
QUIET_FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        Contender("pfl", "pfl_job.py", "pfl-research: SimulatedBackend in one process", "pfl"),
        Contender(
            "pfl-processes",
            "pfl_job.py",
            "pfl-research: its distributed simulation, one process with one thread a core",
            "pfl",
            {"PEER_WORKERS": str(os.cpu_count() or 1), "OMP_NUM_THREADS": "1"},
        ),
        Contender(
            "flwr",
            "flwr_job.py",
            "Flower: simulation by Ray, one client a core",
            "flwr",
            QUIET_FLOWER,
        ),
        Contender(
            "fedlab", "fedlab_job.py", "FedLab: standalone simulation, serial trainer", "fedlab"
        ),
        Contender(
            "fedjax", "fedjax_job.py", "FedJAX: its federated averaging, compiled by XLA", "fedjax"
        ),
        Contender("fluke", "fluke_job.py", "fluke: CentralizedFL, evaluation turned off", "fluke"),
    )
}


def choose_peers(names: Sequence[str]) -> list[Contender]:
    """Those of that name, or all; in the order of the table, each once."""
    for name in names:
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
    return [peer for peer in PEERS.values() if not names or peer.name in names]
