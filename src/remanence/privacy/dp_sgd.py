"""Differential privacy of single examples: every example's gradient is clipped by itself, and noise
hides whether any one example was there.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with differential
privacy", CCS 2016, algorithm 1, at every client. The model that leaves a client is then private
towards everyone, including the server, if the client keeps its noise secret. `dp` protects whole
clients, from those who see only the global model. The two can be combined.
`rounds/privacy_budget.py` computes the epsilon.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core import pytree, rng
from remanence.core.compose import part
from remanence.core.contexts import ClientOps, Context
from remanence.core.declarations import AT_CLIENT, EACH_PASS, EXAMPLE, MODEL, Mechanism
from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Batch

NAME = "dp_sgd"


@part
def dp_sgd(
    *, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, budget: float = 0.0
) -> Part:
    """g = 1/b (sum_i min(1, clip / ||g_i||) g_i + N(0, (noise * clip)^2)) over the b examples of a
    batch, instead of their mean gradient.

    Regularizers such as FedProx's read no example and are added unclipped. The accountant counts
    every epoch as one use of each of a client's examples. It assumes no amplification by sampling,
    because batches are shuffled and not sampled independently.

    Args:
        clip: Largest norm of an example's gradient.
        noise: Noise multiplier z; 0: clipping only, no guarantee.
        delta: At which epsilon is reported; well below 1 / examples of a client.
        budget: Epsilon not to exceed: the run stops before; 0: none.
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

    def gradient(params: Params, batch: Batch, ops: ClientOps, ctx: Context) -> Params:
        grads, regularizer_grads = ops.per_example_grad(params, batch)
        total = clipped_sum(grads, batch.weight, ctx.hyper["clip"])
        count, key = batch.weight.sum(), rng.fold_in(ctx.key, NAME)
        deviation = ctx.hyper["noise"] * ctx.hyper["clip"]
        return {
            name: (sum_ + deviation * rng.normal(rng.fold_in(key, name), sum_.shape, sum_.dtype))
            / count
            + regularizer_grads[name]
            for name, sum_ in total.items()
        }

    return Part(
        NAME,
        hyper={"clip": clip, "noise": noise},
        static=("delta", "budget"),
        gradient=gradient,
        mechanisms=(
            Mechanism(
                EXAMPLE,
                covers=MODEL,
                drawn_at=AT_CLIENT,
                noise=noise,
                spent=EACH_PASS,
                delta=delta,
                budget=budget,
                subject="its client's examples",
            ),
        ),
    )


def clipped_sum(grads: Params, weight: Tensor, limit: Tensor) -> Params:
    """The sum of the examples' gradients, each clipped to a norm over the whole model. Padding, of
    weight 0, does not count.

    >>> gradients = {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4], [9.0, 9.0]])}
    >>> clipped_sum(gradients, torch.tensor([1.0, 1.0, 0.0]), torch.tensor(1.0))
    {'w': tensor([0.9000, 1.2000])}

    Args:
        grads: [B, ...]
        weight: [B]
        limit: Largest norm.
    """
    # [B]
    squares = torch.stack([g.flatten(1).square().sum(dim=1) for g in grads.values()]).sum(dim=0)
    norms = squares.sqrt()
    factors = torch.where(weight > 0, torch.where(norms > limit, limit / norms, 1.0), 0.0)
    return pytree.map(
        lambda g: (factors.to(g).reshape(-1, *(1,) * (g.dim() - 1)) * g).sum(dim=0), grads
    )
