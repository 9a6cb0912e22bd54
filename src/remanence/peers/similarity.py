"""How alike two clients seem: the inverse loss of a peer's model on a client's own training
rows, and what peers tell of others (two hops).
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.pytree import Tree
from remanence.core.types import TaskInfo

BYTES = 8  # of one similarity, as it travels
LOWEST_LOSS = 1e-10
HIGHEST = 20.0  # similarities above it count as it: tau times more would overflow an exponential


def init_similarity(info: TaskInfo) -> Tree:
    """No client has met another, and all seem equally similar. -> similarity [K, K], met [K, K]"""
    everybody = torch.full(
        (info.num_clients, info.num_clients),
        1 / max(info.num_clients - 1, 1),
        dtype=torch.float64,
        device=info.device,
    )
    everybody.fill_diagonal_(0)
    return {"similarity": everybody, "met": torch.zeros_like(everybody, dtype=torch.bool)}


def update(state: Tree, probed: Tensor, losses: Tensor) -> Tree:
    """After trying the models of some peers: their similarity is the inverse loss; those never met
    are rated by the most similar of the probed peers.

    probed: [K, m] int64, -1: no peer; losses: [K, m] mean cross-entropy. A loss that is no number
        makes a peer as unlike as can be.
    """
    old, there = state["similarity"], probed >= 0
    place = probed.clamp(min=0)
    worst = torch.full_like(losses, torch.inf)
    alike = 1 / torch.where(torch.isnan(losses), worst, losses).clamp(min=LOWEST_LOSS)  # [K, m]
    met = mark_met(state["met"], probed)
    return {
        "similarity": _two_hops(old, _write(old, place, alike, there), place, alike, there, met),
        "met": met,
    }


def mark_met(met: Tensor, peers: Tensor) -> Tensor:
    """The table of who has met whom, with these meetings. met: [K, K] bool, peers: [K, m], -1:
    no peer
    """
    ones = torch.ones_like(peers, dtype=torch.float64)
    return met | (
        _write(torch.zeros_like(met, dtype=torch.float64), peers.clamp(min=0), ones, peers >= 0) > 0
    )


def logits(similarity: Tensor, tau: Tensor | float) -> Tensor:
    """What peers are drawn by: softmax(tau * clipped similarity) among those that can be
    reached.
    """
    return tau * similarity.clamp(0, HIGHEST)


def _write(table: Tensor, place: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """The table [K, K] with values [K, m] at the places [K, m]; what is not there goes to a
    column of its own, which is cut off.
    """
    wide = torch.cat([table, table[:, :1]], dim=1)
    return wide.scatter(1, torch.where(there, place, table.shape[1]), values)[:, :-1]


def _two_hops(
    old: Tensor, new: Tensor, place: Tensor, alike: Tensor, there: Tensor, met: Tensor
) -> Tensor:
    """similarity[k, j] = old[p, j] for every j never met, p being the probed peer most alike to
    k among those that know j.
    """
    # [K, m, K]: what the probed peers held of everybody at the end of the round before
    peer_tables = old[place]
    knows = there.unsqueeze(2) & (peer_tables > 0)
    weight = torch.where(knows, alike.unsqueeze(2), -torch.inf)  # [K, m, K]
    best, via = weight.max(dim=1)  # [K, K]
    indirect = peer_tables.gather(1, via.unsqueeze(1)).squeeze(1)
    unknown = ~met & ~torch.eye(len(old), dtype=torch.bool, device=old.device)
    return torch.where(unknown & (best > -torch.inf), indirect, new)
