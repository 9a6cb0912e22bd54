"""DAC: decentralized adaptive clustering. Clients average with peers whose models have a low loss
on their own data, and so find their cluster.

Zec et al., "Decentralized adaptive clustering of deep nets is beneficial for client collaboration",
2022, as algorithm 3 of Klefbom and Toftås 2023.

    step                                        slot              function
    s <- 1 / (K - 1)                            peers.init        similarity.init_similarity
    m peers, by softmax(tau s)                  peers.candidates  probe
    s <- inverse losses, and two hops           peers.select      similarity.update
    average with these peers                    peers.select      decide
"""

from __future__ import annotations

import math

from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import PeerContext
from remanence.core.declarations import MIXING, PEER_DRIFT, Remedy
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part, PeerAverage, PeerSelection
from remanence.methods.gossip import MODELS, check_peers
from remanence.peers import similarity
from remanence.peers.peer_sampling import sample_weighted

GROWTH = 0.2  # rate of the authors' schedule of tau
ADDRESSES = (
    Remedy(
        MIXING, "averages with peers whose models have a low loss on the client's own data", rank=1
    ),
    Remedy(PEER_DRIFT, rank=1),
)


@part
def dac(
    *,
    peers: int = 6,
    tau: float = 30.0,
    schedule: bool = False,
    overwrite_first: bool = False,
) -> Part:
    """Peers are sampled by softmax(tau * s), where s is the inverse loss of a peer's model on the
    client's own training examples.

    Similarities start at 1/(K-1). For a peer never met the client takes the similarity that the
    most similar of the peers just met has for it (two hops). Similarities are clipped to [0, 20].

    Args:
        peers: m, how many peers a client averages with in a round.
        tau: How strongly similar peers are preferred; 0 gives Random.
        schedule: Let tau grow from 1 over the rounds of a time step, 2 tau / (1 + exp(-.2 t)) -
            tau + 1, as in the authors' code.
        overwrite_first: Let a two-hop estimate replace the similarity measured when a peer is met
            for the first time, as in the code of the HAST thesis. The code of DAC's authors keeps
            what was measured, and so does the default.
    """
    check_peers("dac", peers)
    check_range(tau >= 0, "dac", "tau", "of at least 0", tau)

    def probe(ctx: PeerContext) -> Tensor:
        tau_now = ctx.hyper["tau"]
        if schedule:
            tau64 = tau_now.double()
            tau_now = 2 * tau64 / (1 + math.exp(-GROWTH * (ctx.round - 1))) - tau64 + 1
        return sample_weighted(
            similarity.logits(ctx.state["similarity"], tau_now),
            ctx.adjacency,
            peers,
            ctx.key.fold_in("similar"),
        )

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        return (PeerAverage(probed),), similarity.update(
            ctx.state, probed, losses, overwrite_first=overwrite_first
        )

    return Part(
        "dac",
        hyper={"tau": tau},
        static=("peers", "schedule", "overwrite_first"),
        addresses=ADDRESSES,
        peers=PeerSelection(
            similarity.init_similarity,
            probe,
            decide,
            extra_bytes=similarity.BYTES,
            similarity="similarity",
        ),
        payload_description=f"{MODELS}, with its table of similarities",
    )
