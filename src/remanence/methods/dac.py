"""DAC: decentralized adaptive clustering. Clients average with peers whose models do well on their
own data, and so find their cluster.

Zec et al., "Decentralized adaptive clustering of deep nets is beneficial for client collaboration",
2022, as algorithm 3 of Klefbom and Toftås 2023.

    step                                        hook              function
    s <- 1 / (K - 1)                            peers.init        similarity.init_similarity
    m peers, by softmax(tau s)                  peers.candidates  probe
    s <- inverse losses, and two hops           peers.select      similarity.update
    average with these peers                    peers.select      decide
"""

from __future__ import annotations

import math

from torch import Tensor

from remanence.core.compose import part
from remanence.core.declarations import MIXING, PEER_DRIFT, Remedy
from remanence.core.errors import check_range
from remanence.core.pytree import Tree
from remanence.core.slots import Part, PeerAverage, PeerContext, PeerSelection
from remanence.methods.gossip import MODELS, check_peers
from remanence.peers import similarity
from remanence.peers.peer_sampling import sample_weighted

SPREAD = 0.2  # of the published schedule of tau


@part
def dac(*, peers: int = 6, tau: float = 30.0, schedule: bool = False) -> Part:
    """Peers are drawn by softmax(tau * s), s being the inverse loss of a peer's model on the
    client's own training rows.

    peers: m, how many it listens to in a round. tau: how strongly it prefers those alike; 0 is
    Random. schedule: let tau grow from 1 over the rounds of a time step, 2 tau / (1 + exp(-.2 t)) -
    tau + 1, as in the authors' code. Similarities start at 1/(K-1); a peer never met is rated by
    what the most alike of the peers just met holds of it (two hops). Similarities are clipped to
    [0, 20].
    """
    check_peers("dac", peers)
    check_range(tau >= 0, "dac", "tau", "of at least 0", tau)

    def probe(ctx: PeerContext) -> Tensor:
        now = ctx.hyper["tau"]
        if schedule:
            tau64 = now.double()
            now = 2 * tau64 / (1 + math.exp(-SPREAD * (ctx.round - 1))) - tau64 + 1
        return sample_weighted(
            similarity.logits(ctx.state["similarity"], now),
            ctx.adjacency,
            peers,
            ctx.key.fold_in("similar"),
        )

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        return (PeerAverage(probed),), similarity.update(ctx.state, probed, losses)

    return Part(
        "dac",
        hyper={"tau": tau},
        static=("peers", "schedule"),
        addresses=(
            Remedy(
                MIXING, "listens to peers whose models do well on the client's own data", rank=1
            ),
            Remedy(PEER_DRIFT, rank=1),
        ),
        peers=PeerSelection(
            similarity.init_similarity,
            probe,
            decide,
            extra_bytes=similarity.BYTES,
            similarity="similarity",
        ),
        payload_description=f"{MODELS}, with its table of similarities",
    )
