"""Estimated similarity between clients: the inverse loss of a peer's model on a client's own
training examples; for other clients, the estimate of a peer (two hops).
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.pytree import Tree
from remanence.core.types import TaskInfo

BYTES = 8  # of one similarity in a message
LOWEST_LOSS = 1e-10
HIGHEST = 20.0  # similarities are clipped here: exp(tau * similarity) could overflow


def init_similarity(info: TaskInfo) -> Tree:
    """No model has been evaluated: equal similarities. -> similarity [K, K], met [K, K]"""
    equal = torch.full(
        (info.num_clients, info.num_clients),
        1 / max(info.num_clients - 1, 1),
        dtype=torch.float64,
        device=info.device,
    )
    equal.fill_diagonal_(0)
    return {"similarity": equal, "met": torch.zeros_like(equal, dtype=torch.bool)}


def update(state: Tree, probed: Tensor, losses: Tensor, *, overwrite_first: bool = False) -> Tree:
    """Update the similarities after evaluating the models of some peers.

    The similarity of these peers is the inverse loss. For a client that has never been met, it is
    the estimate of the most similar of these peers.

    Args:
        state: Similarities and met pairs.
        probed: The peers, [K, m] int64, -1: no peer.
        losses: Mean cross-entropy, [K, m]. NaN counts as an infinite loss.
        overwrite_first: A peer counts as never met also in the round in which it is met, so that
            an estimate replaces the first measurement.
    """
    old, is_peer = state["similarity"], probed >= 0
    peers = probed.clamp(min=0)
    worst = torch.full_like(losses, torch.inf)
    found = 1 / torch.where(torch.isnan(losses), worst, losses).clamp(min=LOWEST_LOSS)  # [K, m]
    met = mark_met(state["met"], probed)
    measured = _write(old, peers, found, is_peer)
    known = state["met"] if overwrite_first else met
    return {
        "similarity": _two_hops(old, measured, peers, found, is_peer, known),
        "met": met,
    }


def mark_met(met: Tensor, peers: Tensor) -> Tensor:
    """Mark the pairs of clients whose models have been evaluated.

    Args:
        met: [K, K] bool.
        peers: The peers of each client, [K, m], -1: no peer.
    """
    ones = torch.ones_like(peers, dtype=torch.float64)
    return met | (
        _write(torch.zeros_like(met, dtype=torch.float64), peers.clamp(min=0), ones, peers >= 0) > 0
    )


def logits(similarity: Tensor, tau: Tensor | float) -> Tensor:
    """The scores by which peers are drawn: tau * clipped similarity."""
    return tau * similarity.clamp(0, HIGHEST)


def _write(table: Tensor, peers: Tensor, values: Tensor, is_peer: Tensor) -> Tensor:
    """Write values [K, m] into a table [K, K] at the columns `peers` [K, m], where `is_peer`."""
    wide = torch.cat([table, table[:, :1]], dim=1)  # values without a peer go to an extra column
    return wide.scatter(1, torch.where(is_peer, peers, table.shape[1]), values)[:, :-1]


def _two_hops(
    old: Tensor, new: Tensor, peers: Tensor, found: Tensor, is_peer: Tensor, met: Tensor
) -> Tensor:
    """similarity[k, j] = old[p, j] for every j that k has never met, where p is the most similar of
    the evaluated peers that have an estimate for j.
    """
    peer_tables = old[peers]  # [K, m, K]: the peers' estimates at the end of the previous round
    knows = is_peer.unsqueeze(2) & (peer_tables > 0)
    weight = torch.where(knows, found.unsqueeze(2), -torch.inf)  # [K, m, K]
    best, via = weight.max(dim=1)  # [K, K]
    indirect = peer_tables.gather(1, via.unsqueeze(1)).squeeze(1)
    unknown = ~met & ~torch.eye(len(old), dtype=torch.bool, device=old.device)
    return torch.where(unknown & (best > -torch.inf), indirect, new)
