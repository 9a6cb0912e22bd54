"""Whom clients listen to: how often to their own cluster, against chance. From the records of
`run.peers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.metrics.accuracy_tables import divide
from remanence.results.ledger import HEARD, SIMILARITY

__all__ = ["HEARD", "SIMILARITY", "PeerUsage", "same_cluster_usage"]


@dataclass(frozen=True)
class PeerUsage:
    """How much of the listening between two records stayed within the listeners' own clusters."""

    round: np.ndarray  # [R]
    # [R] share of the peers listened to; NaN where nobody listened; an oracle has 1
    same_cluster: np.ndarray
    # [R] the same share for peers drawn at random: (size of the own cluster - 1) / (K - 1)
    chance: np.ndarray


def same_cluster_usage(peers: np.ndarray, clusters: Any) -> PeerUsage:
    """The share of the peers listened to that are in the listener's own cluster, and what chance
    would give, both over all listening since the record before.

    Clients 0 and 1 are in a cluster, 2 alone. 0 listened three times to 1 and once to 2. By chance
    it would have heard 1 in (2 - 1) / (3 - 1) of all cases:

    >>> from remanence.results.ledger import peers_type
    >>> heard = np.array([(5, 0, HEARD, [[0, 3, 1], [0, 0, 0], [0, 0, 0]])], dtype=peers_type(3))
    >>> usage = same_cluster_usage(heard, [[0, 0, 1]])
    >>> usage.same_cluster, usage.chance
    (array([0.75]), array([0.5]))
    """
    table = np.asarray(clusters, dtype=np.int64)
    heard = peers[peers["kind"] == HEARD]
    if not len(heard):
        return PeerUsage(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    size = heard["values"].shape[1]
    now = table[heard["time_step"]]  # [R, K]
    same = (now[:, :, None] == now[:, None, :]) & ~np.eye(size, dtype=bool)  # [R, K, K]
    often = np.where(np.eye(size, dtype=bool), 0.0, heard["values"].astype(np.float64))
    chance = same.sum(axis=2) / max(size - 1, 1)  # [R, K]
    total = often.sum(axis=(1, 2))
    return PeerUsage(
        heard["round"],
        divide((often * same).sum(axis=(1, 2)), total),
        divide((often.sum(axis=2) * chance).sum(axis=1), total),
    )
