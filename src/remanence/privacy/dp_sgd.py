"""Differential privacy of single examples: every row's gradient is clipped by itself, and noise
hides whether any one of them was there.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with differential
privacy", CCS 2016, algorithm 1, at every client. What leaves a client is then private towards
everybody, the server too, if its noise is the client's own secret; `dp` hides whole clients, and
from those alone who see no more than the global model. The two can be combined. What it amounts to
is computed in `rounds/privacy_budget.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core import pytree, rng
from remanence.core.compose import ComposedMethod, part
from remanence.core.errors import InputError, check_range
from remanence.core.pytree import Params
from remanence.core.slots import ClientOps, Context, Part
from remanence.core.types import Batch
from remanence.training.client_step import TrainingTask

NAME = "dp_sgd"
NOISY_COUNTS = "add dp_counts, whose noise hides single rows in them"
# Parts whose extras are a function of what is private already, or of numbers that everybody knows;
# and what the others would need.
PAYLOAD_ALREADY_PRIVATE = ("fednova",)


@part
def dp_sgd(
    *, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, budget: float = 0.0
) -> Part:
    """g = 1/b (sum_i min(1, clip / ||g_i||) g_i + N(0, (noise * clip)^2)) over the b rows of a
    batch, instead of their mean gradient.

    Penalties such as FedProx's look at no row and are added as they are. The account takes every
    pass over a client's rows for one look at each of them: no credit is given for the order being
    secret (batches are shuffled, not drawn by coins).

    clip: the longest gradient of a row. noise: the multiplier z; 0: clipping alone, no promise.
    delta: at which epsilon is told, well below 1 / rows of a client. budget: an epsilon at which
    the run stops before it is passed; 0: no limit.
    """
    check_range(clip > 0, NAME, "clip", "above 0", clip)
    check_range(noise >= 0, NAME, "noise", "of at least 0", noise)
    check_range(0 < delta < 1, NAME, "delta", "between 0 and 1", delta)
    check_range(budget >= 0, NAME, "budget", "of at least 0", budget)
    if budget and not noise:
        raise InputError(
            f"dp_sgd: a budget of {budget:g} cannot be kept without noise: give noise,"
            " such as noise=1, or leave the budget out"
        )

    def gradient(params: Params, batch: Batch, lent: ClientOps, ctx: Context) -> Params:
        rows, penalty = lent.per_example_grad(params, batch)
        total = clipped_sum(rows, batch.weight, ctx.hyper["clip"])
        count, key = batch.weight.sum(), rng.fold_in(ctx.key, NAME)
        deviation = ctx.hyper["noise"] * ctx.hyper["clip"]
        return {
            name: (sum_ + deviation * rng.normal(rng.fold_in(key, name), sum_.shape, sum_.dtype))
            / count
            + penalty[name]
            for name, sum_ in total.items()
        }

    return Part(NAME, hyper={"clip": clip, "noise": noise}, gradient=gradient)


def clipped_sum(rows: Params, weight: Tensor, limit: Tensor) -> Params:
    """The sum of the rows' gradients, none of which is longer than the limit over the whole model;
    padding, of weight 0, counts nothing.

    >>> clipped_sum({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4], [9.0, 9.0]])}, torch.tensor([1.0, 1.0, 0.0]), torch.tensor(1.0))
    {'w': tensor([0.9000, 1.2000])}

    rows: [B, ...]; weight: [B]
    """
    # [B]
    squares = torch.stack([row.flatten(1).square().sum(dim=1) for row in rows.values()]).sum(dim=0)
    norms = squares.sqrt()
    factors = torch.where(weight > 0, torch.where(norms > limit, limit / norms, 1.0), 0.0)
    return pytree.map(
        lambda row: (factors.to(row).reshape(-1, *(1,) * (row.dim() - 1)) * row).sum(dim=0), rows
    )


def check_examples(task: TrainingTask) -> None:
    """Refuse a method with dp_sgd in which a row could be felt in any other way than through
    its clipped gradient.
    """
    method = task.method
    if method.part_filling("gradient") is None or not any(p.name == NAME for p in method.parts):
        return
    if task.model.depends_on_batch:
        raise InputError(
            "dp_sgd clips the gradient of every single row, and batch norm mixes rows: use"
            " a model with group norm, or set local.buffers to frozen"
        )
    for p in method.parts:
        if cure := _find_uncovered(p, method):
            raise InputError(f"dp_sgd and {p.name} cannot be combined: {cure}")
    for phase in task.phases:
        if phase.accept is not None:
            raise InputError(
                "dp_sgd cannot protect rows that decide whether a phase of training is kept:"
                " use another method"
            )


def _find_uncovered(p: Part, method: ComposedMethod) -> str:
    """What of a part tells more about single rows than a clipped gradient, and the cure;
    nothing, mostly.
    """
    noisy = method.part_filling("privatize_stats") is not None
    if p.peers is not None or p.model_assignment is not None:
        return (
            f"{p.name} tries models on a client's rows and tells how well they do; use a"
            " method with one server model"
        )
    if p.name == "flashback" and not noisy:
        return f"flashback sends label counts; {NOISY_COUNTS}"
    if p.name in LABEL_LOSSES and not noisy:
        return f"{p.name} weighs every row by the label counts of all; {NOISY_COUNTS}"
    if p.name == "fedwavg":
        return (
            ""
            if p.arguments["noise"]
            else "fedwavg sends how many rows were forgotten; write fedwavg(noise=5)"
        )
    if p.name == "scaffold":
        return (
            ""
            if p.arguments["option"] == 2
            else "its variates are plain gradients; write scaffold(option=2)"
        )
    if p.payload is not None and p.name not in (*PAYLOAD_ALREADY_PRIVATE, "flashback"):
        return (
            f"{p.name} sends more than its model, which the clipped gradients do not cover;"
            " leave one of them out"
        )
    return ""


LABEL_LOSSES = ("fedlc", "fedrs", "masked_ce", "tce", "wsm")
