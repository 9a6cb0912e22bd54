"""The selection of peers in decentralized learning: how often clients use models of their own
cluster, compared with chance. Computed from the records of `run.peers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.metrics.accuracy_tables import divide
from remanence.results.ledger import PEER_COUNTS


@dataclass(frozen=True)
class PeerUsage:
    """The share of used peers from the clients' own clusters, between two records."""

    round: np.ndarray  # [R]
    same_cluster: np.ndarray  # [R]; NaN if no client used a peer
    chance: np.ndarray  # [R] for random peers: (size of the own cluster - 1) / (K - 1)


def same_cluster_usage(peers: np.ndarray, clusters: Any) -> PeerUsage:
    """The share of used peers that are in the client's own cluster, and the share that random peers
    would have, both over all uses since the previous record.

    Args:
        peers: The records of `run.peers`.
        clusters: The cluster of each client at each time step [T, K].

    Clients 0 and 1 are in one cluster, client 2 in another. Client 0 used the model of client 1
    three times and that of client 2 once. At random it would have used client 1 in
    (2 - 1) / (3 - 1) of all cases:

    >>> from remanence.results.ledger import peers_type
    >>> record = (5, 0, PEER_COUNTS, [[0, 3, 1], [0, 0, 0], [0, 0, 0]])
    >>> usage = same_cluster_usage(np.array([record], dtype=peers_type(3)), [[0, 0, 1]])
    >>> usage.same_cluster, usage.chance
    (array([0.75]), array([0.5]))
    """
    table = np.asarray(clusters, dtype=np.int64)
    counts = peers[peers["kind"] == PEER_COUNTS]
    if not len(counts):
        return PeerUsage(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    size = counts["values"].shape[1]
    now = table[counts["time_step"]]  # [R, K]
    same = (now[:, :, None] == now[:, None, :]) & ~np.eye(size, dtype=bool)  # [R, K, K]
    uses = np.where(np.eye(size, dtype=bool), 0.0, counts["values"].astype(np.float64))
    chance = same.sum(axis=2) / max(size - 1, 1)  # [R, K]
    total = uses.sum(axis=(1, 2))
    return PeerUsage(
        counts["round"],
        divide((uses * same).sum(axis=(1, 2)), total),
        divide((uses.sum(axis=2) * chance).sum(axis=1), total),
    )
