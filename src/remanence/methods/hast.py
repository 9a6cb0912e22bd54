"""HAST: hierarchical aggregation with similarity-based tuning. Clients average the whole model with
random peers, and the classifier with similar ones.

Klefbom and Toftås, "Decentralized deep learning under distributed concept drift", Chalmers 2023,
algorithm 4, whose lines have no numbers.

    step                                        slot              function
    s <- 1 / (K - 1)                            peers.init        similarity.init_similarity
    S_rand <- m random clients                  peers.candidates  probe
    s <- UpdateSimilarities(S_rand, w)          peers.select      decide, similarity.update
    w <- FedAvg of all layers (S_rand and k)    peers.select      decide, first PeerAverage
    S_sim <- WeightedSampling(m, s), with s of  peers.select      decide, sample_weighted
      the round before unless fresh=True
    w_phi <- FedAvg of classifier (S_sim and k) peers.select      decide, second PeerAverage
    w <- LocalTraining(w)                       phases            fine_tune, first phase
    w_phi <- LocalTraining(w_phi)               phases            fine_tune, second phase
      if that lowers the validation loss        phases            validation_improves
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, PeerContext
from remanence.core.declarations import DRIFT, MIXING, PEER_DRIFT, Remedy
from remanence.core.pytree import Tree, weighted_mean
from remanence.core.ranges import check_range
from remanence.core.slots import Part, PeerAverage, PeerSelection, Phase
from remanence.core.types import ModelState, TaskInfo
from remanence.methods.gossip import MODELS, check_peers
from remanence.peers import similarity
from remanence.peers.peer_sampling import sample_uniform, sample_weighted

ADDRESSES = (
    Remedy(
        MIXING, "averages the classifier only with similar clients, where mixing loses accuracy"
    ),
    Remedy(
        DRIFT,
        "needs no server: clients average the whole model with random peers and the"
        " classifier with similar ones",
        rank=1,
    ),
    Remedy(
        PEER_DRIFT,
        "averages features over all clients, so that a client that changes cluster keeps them",
    ),
)


@part
def hast(
    *,
    peers: int = 3,
    tau: float = 30.0,
    depth: int = 3,
    finetune_epochs: int = 3,
    fresh: bool = False,
) -> Part:
    """Average all layers with m random peers, the classifier with m similar ones; train everything,
    then fine-tune the classifier.

    Args:
        peers: m, of each kind.
        tau: How strongly similar peers are preferred.
        depth: Layers of the classifier, counted from the output; 0 is the method `random`. With all
            layers HAST is DAC with an average over random peers before it.
        finetune_epochs: Epochs that train the classifier alone, kept only if they lower the
            validation loss.
        fresh: Sample similar peers by this round's similarities, as in algorithm 4. The default is
            last round's, as in the authors' code, which produced the numbers of the thesis.
    """
    check_peers("hast", peers)
    check_range(tau >= 0, "hast", "tau", "of at least 0", tau)
    check_range(depth >= 0, "hast", "depth", "of at least 0", depth)
    check_range(finetune_epochs >= 0, "hast", "finetune_epochs", "of at least 0", finetune_epochs)

    def decide(
        probed: Tensor, losses: Tensor, ctx: PeerContext
    ) -> tuple[tuple[PeerAverage, ...], Tree]:
        updated = similarity.update(ctx.state, probed, losses)
        if depth == 0:
            return (PeerAverage(probed),), updated
        table = (updated if fresh else ctx.state)["similarity"]
        alike = sample_weighted(
            similarity.logits(table, ctx.hyper["tau"]),
            ctx.adjacency,
            peers,
            ctx.key.fold_in("similar"),
        )
        return (PeerAverage(probed), PeerAverage(alike, classifier(ctx.info, depth))), updated | {
            "met": similarity.mark_met(updated["met"], alike)
        }

    return Part(
        "hast",
        hyper={"tau": tau},
        static=("peers", "depth", "finetune_epochs", "fresh"),
        addresses=ADDRESSES,
        phases=functools.partial(fine_tune, depth, finetune_epochs),
        peers=PeerSelection(
            similarity.init_similarity,
            functools.partial(probe, peers),
            decide,
            extra_bytes=similarity.BYTES,
            similarity="similarity",
        ),
        payload_description=f"{MODELS}, with its table of similarities",
    )


def probe(peers: int, ctx: PeerContext) -> Tensor:
    """The random peers, whose models the client evaluates. -> [K, m]"""
    return sample_uniform(ctx.adjacency, peers, ctx.key.fold_in("random"))


def fine_tune(depth: int, finetune_epochs: int, phase: Phase) -> tuple[Phase, ...]:
    """The experiment's phase, then one that trains the classifier alone."""
    if depth == 0 or finetune_epochs == 0:
        return (phase,)
    return phase, Phase(
        epochs=finetune_epochs,
        trainable=lambda info, names: classifier(info, depth),
        accept=validation_improves,
    )


def classifier(info: TaskInfo, depth: int) -> tuple[str, ...]:
    """The parameters of the last layers."""
    layers: Sequence[Sequence[str]] = info.layers[:depth]  # counted from the output
    return tuple(name for layer in layers for name in layer)


def validation_improves(ctx: Context, old: ModelState, new: ModelState, ops: ClientOps) -> Tensor:
    """Whether the loss on the client's validation examples is lower; False without examples."""

    def loss(model: ModelState) -> Tensor:
        out, batch = ops.predict(model, "valid")
        return weighted_mean(
            torch.nn.functional.cross_entropy(out.logits, batch.y, reduction="none"), batch.weight
        )

    return loss(new) < loss(old)
