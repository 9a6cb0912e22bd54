"""FedNova: every client's update is divided by its own number of effective steps, so that more
local steps give no more weight.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization",
NeurIPS 2020, section 4.

    step                                   slot               function
    a_i, accumulated over the local steps  step_tracker       init_, next_effective_steps
    send ||a_i||_1                         on_client_end      send_steps
    d = sum_i p_i (y_i - x) / ||a_i||_1    aggregate.partial  sum_normalized
    x <- x + tau_eff d                     aggregate.finalize rescale
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context, ServerContext
from remanence.core.declarations import AGGREGATION, Disclosure, Remedy
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Aggregate, Optimizer, Part, StepTracker
from remanence.core.types import Batch, ModelState, Reply, TaskInfo


@part
def fednova() -> Part:
    """x <- x + (sum_i p_i a_i) * sum_i p_i (y_i - x) / a_i, with p_i the clients' weights and a_i =
    ||a_i||_1 their effective local steps.

    a_i is the number of plain gradient steps that client i's steps amount to. A step of plain SGD
    makes a_i into a_i + 1. With momentum rho it becomes a_i + m, after m <- rho m + 1; with FedProx
    (1 - lr mu) a_i + 1, and likewise with weight decay. It is computed by applying the client's own
    optimizer and regularizers to a scalar whose loss has gradient 1, so that other regularizers and
    Nesterov's momentum count as well. Where all a_i are equal this is FedAvg.
    """
    return Part(
        "fednova",
        step_tracker=StepTracker(init_effective_steps, next_effective_steps),
        on_client_end=send_steps,
        payload=lambda start, info: {"steps": torch.zeros((), dtype=info.dtype)},
        discloses={"steps": Disclosure("size")},
        addresses=(
            Remedy(
                AGGREGATION,
                "keeps clients with many local steps from having more influence than others",
                rank=2,
                needs_unequal_steps=True,
            ),
        ),
        aggregate=Aggregate(sum_normalized, rescale, is_decomposable=True),
        validate=check_steps_add_up,
        payload_description="one number: its effective local steps",
    )


def check_steps_add_up(optimizer: Optimizer, info: TaskInfo) -> None:
    """a_i is defined where the update is a weighted sum of the gradients with fixed weights."""
    if optimizer.name in ("adam", "adamw"):
        raise InputError(
            f"fednova: the update of {optimizer.name} is not a weighted sum of gradients, so it has"
            " no number of effective steps: train with sgd, with or without momentum"
        )


def init_effective_steps(ctx: Context, ops: ClientOps) -> Tree:
    return ops.effective_steps(None)


def next_effective_steps(
    tracker_state: Tree,
    before: ModelState,
    after: ModelState,
    batch: Batch,
    ops: ClientOps,
    ctx: Context,
) -> Tree:
    return ops.effective_steps(tracker_state)


def send_steps(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    """a_i = -u / lr"""
    lr = ctx.optimizer_hparams["lr"]
    # a schedule may end at 0: updates are 0 then, and any number of steps will do
    moving = lr > 0
    steps = -ctx.tracker_state["at"]["u"] / torch.where(moving, lr, torch.ones_like(lr))
    return {}, {"steps": torch.where(moving, steps, torch.ones_like(steps))}


def sum_normalized(weights: Tensor, replies: Reply, srv: ServerContext) -> Tree:
    steps = replies.payload["fednova"]["steps"].to(weights)  # [k]
    return {
        "direction": pytree.weighted_sum(weights / steps, replies.delta(srv.start)),
        "steps": (weights * steps).sum(),
    }


def rescale(total: Tree, srv: ServerContext) -> Params:
    """The mean direction times tau_eff = sum_i p_i a_i."""
    return pytree.map(lambda d: total["steps"].to(d) * d, total["direction"])
