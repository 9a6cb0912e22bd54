"""Learning without a server: peers chosen at random, by the true clusters, or none.

Every client has a model of its own. In a round it averages it with those of some peers, as they
were at the end of the round before, and trains the result.

Random: Klefbom and Toftås, "Decentralized deep learning under distributed concept drift",
Chalmers 2023, algorithm 2, after Zec et al. 2022.

    m random peers, average with them   slot peers.select   decide
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import PeerContext
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.slots import Part, PeerAverage, PeerSelection
from remanence.core.types import TaskInfo
from remanence.peers.peer_sampling import sample_uniform


@part
def random(*, peers: int = 6) -> Part:
    """Gossip: each client averages its model with those of `peers` random others, then trains.

    Args:
        peers: m, how many peers a client averages with in a round; fewer where fewer can be
            reached.
    """
    check_peers("random", peers)

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        return (
            PeerAverage(sample_uniform(ctx.adjacency, peers, ctx.key.fold_in("random"))),
        ), ctx.state

    return Part(
        "random",
        static=("peers",),
        peers=PeerSelection(no_state, no_candidates, decide),
        payload_description=MODELS,
    )


@part
def oracle(*, peers: int = 6) -> Part:
    """Gossip within the true cluster: an upper bound for other methods, since no client of a real
    federation knows the clusters.

    Args:
        peers: m, how many peers a client averages with in a round; fewer where its cluster is
            smaller.
    """
    check_peers("oracle", peers)

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        alike = ctx.true_cluster.unsqueeze(0) == ctx.true_cluster.unsqueeze(1)
        return (
            PeerAverage(sample_uniform(ctx.adjacency & alike, peers, ctx.key.fold_in("random"))),
        ), ctx.state

    return Part(
        "oracle",
        static=("peers",),
        peers=PeerSelection(no_state, no_candidates, decide),
        payload_description=MODELS,
    )


@part
def local() -> Part:
    """No exchange: every client trains alone."""

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        return (), ctx.state

    return Part("local", peers=PeerSelection(no_state, no_candidates, decide))


MODELS = "its model, to each client that asks"


def no_state(info: TaskInfo) -> Tree:
    return {}


def no_candidates(ctx: PeerContext) -> Tensor:
    return torch.empty(len(ctx.adjacency), 0, dtype=torch.int64, device=ctx.adjacency.device)


def check_peers(name: str, peers: int) -> None:
    """Refuse less than one peer. Where fewer can be reached, a client averages with those."""
    if peers < 1:
        raise InputError(
            f"{name}: peers must be at least 1, not {peers}: a client without peers is `local`"
        )
