"""Flashback: clients distill from the global model, and the server from the clients and the
previous global model, each class in proportion to label counts.

"Flashback: understanding and mitigating forgetting in federated learning", 2023, algorithm 1.
Forgetting in local training and in aggregation increase each other, so both are reduced. A
teacher's weight for a class is proportional to the number of examples of it that the teacher was
trained on.

    line   step                                       slot                 function
    1      pi = 0, r_k = 0                            server_state         init_label_counts
    5      send the model and pi                      broadcast            in `flashback`
    7, 10  local steps with dynamic distillation      loss_terms           client_distillation
    -      send the label counts mu_k                 payload,             in `flashback`
                                                      on_client_end        send_counts
    14-15  w <- mean of the w_k, weighted by n_k      (default)
    16-23  train w on the public set, with teachers   server_train         server_distillation
    21     loss of a public example                   -                    server_loss
    24-29  pi <- pi + gamma mu_k while gamma r_k <= 1 update_server_state  update_label_counts
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext, ServerOps
from remanence.core.declarations import AGGREGATION, Disclosure, Remedy
from remanence.core.pytree import Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch, ModelState, Output, Reply, TaskInfo
from remanence.losses.dynamic_distillation import distill, label_shares


@part
def flashback(*, gamma: float = 0.1, server_epochs: int = 5) -> Part:
    """CE + sum_i sum_c alpha_i^c p_i^c log(p_i^c / q^c), alpha_i = mu_i / (nu + sum_j mu_j), at the
    clients and then at the server. p_i are the probabilities of teacher i and q those of the
    student; mu_i and nu are their label counts.

    At a client nu are its own label counts, and the teacher is the global model with mu = pi. The
    server averages by n_k and trains the average on its labeled public set with the clients'
    optimizer, learning rate and batch size: nu = pi, and the teachers are the round's clients, each
    with its counts, and the previous global model with mu = pi. Then pi grows by gamma * mu_k for
    every client k that has not yet been counted in full. The paper's appendix with its settings is
    not available to us: the defaults are our reading.

    Args:
        gamma: Fraction of a client's label counts added to pi each time it takes part, while
            gamma * r_k <= 1.
        server_epochs: E_s, epochs on the public set in every round.
    """
    check_range(0 < gamma <= 1, "flashback", "gamma", "above 0 and at most 1", gamma)
    check_range(server_epochs >= 1, "flashback", "server_epochs", "of at least 1", server_epochs)
    return Part(
        "flashback",
        hyper={"gamma": gamma},
        loss_terms=(client_distillation,),
        on_client_end=send_counts,
        payload=lambda start, info: {
            "label_counts": torch.zeros(info.num_classes, dtype=info.dtype)
        },
        discloses={"label_counts": Disclosure("label_counts", is_count=True)},
        reads_label_counts=True,
        static=("server_epochs",),
        addresses=(
            Remedy(
                AGGREGATION,
                "distills the clients' models into the aggregated one at the server (it needs"
                " public examples: data.public)",
            ),
        ),
        server_state=init_label_counts,
        broadcast=lambda srv: {"pi": srv.state["pi"]},
        server_train=functools.partial(server_distillation, server_epochs),
        update_server_state=update_label_counts,
        payload_description="its label counts, which are sensitive",
        needs_public_data=True,
    )


def init_label_counts(start: ModelState, info: TaskInfo) -> Tree:
    """Line 1: pi = 0; r_k, how often client k took part."""
    return {
        "pi": torch.zeros(info.num_classes, dtype=info.dtype),
        "r": torch.zeros(info.num_clients, dtype=torch.int64),
    }


def client_distillation(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
    """Lines 7 and 10. In round 1 pi is 0, so alpha is 0 and only cross-entropy remains."""
    alpha = label_shares(nu=ctx.stats.label_counts, mu=ctx.broadcast["pi"].unsqueeze(0))
    return distill(out.logits, ops.forward(ctx.start).logits.unsqueeze(0), alpha)


def send_counts(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {}, {"label_counts": ctx.stats.label_counts}


def server_distillation(
    server_epochs: int,
    merged: ModelState,
    previous: ModelState,
    replies: Reply,
    ops: ServerOps,
    srv: ServerContext,
) -> ModelState:
    """Lines 16 to 23. In round 1 pi is 0, so the previous model has no weight as a teacher."""
    # [1, C], [k, C]
    pi, counts = srv.state["pi"].unsqueeze(0), replies.payload["flashback"]["label_counts"]
    alpha = label_shares(nu=pi[0], mu=torch.cat([counts, pi]))
    teacher_logits = torch.cat(
        [
            ops.predict_logits(ops.local_models(replies)),
            ops.predict_logits(previous).unsqueeze(0),
        ]
    )  # [k + 1, n, C]
    return ops.fit(
        merged,
        server_loss,
        {"teacher_logits": teacher_logits, "alpha": alpha},
        epochs=server_epochs,
    )


def server_loss(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
    """Line 21."""
    return cross_entropy(out.logits, batch.y, reduction="none") + distill(
        out.logits, loss_args["teacher_logits"][:, index], loss_args["alpha"]
    )


def update_label_counts(replies: Reply, srv: ServerContext) -> Tree:
    """Lines 24 to 29: r_k counts this round already when gamma * r_k is compared with 1."""
    gamma, counts = srv.hyper["gamma"], replies.payload["flashback"]["label_counts"]
    r = srv.state["r"].index_add(0, replies.client, torch.ones_like(replies.client))
    counted = (gamma * r[replies.client] <= 1).to(counts)  # [k]
    return {"pi": srv.state["pi"] + gamma * (counted.unsqueeze(1) * counts).sum(dim=0), "r": r}
