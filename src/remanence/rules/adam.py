"""Adam and AdamW as torch.optim has them."""

from __future__ import annotations

import torch

from remanence import trees
from remanence.rules.sgd import require
from remanence.trees import Params, Tree
from remanence.types import Context, Optimiser


def adam(*, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Optimiser:
    """Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; weight decay enters the gradient."""
    return _adam("adam", lr, beta1, beta2, eps, weight_decay, decoupled=False)


def adamw(*, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Optimiser:
    """Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019: weight decay acts on the weights."""
    return _adam("adamw", lr, beta1, beta2, eps, weight_decay, decoupled=True)


def _adam(name: str, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool) -> Optimiser:
    require(lr > 0, name, "lr", "above 0", lr)
    require(0 <= beta1 < 1, name, "beta1", "from 0 to below 1", beta1)
    require(0 <= beta2 < 1, name, "beta2", "from 0 to below 1", beta2)
    require(eps > 0, name, "eps", "above 0", eps)
    require(weight_decay >= 0, name, "weight_decay", "of at least 0", weight_decay)

    def init(params: Params) -> Tree:
        return {
            "first": trees.zeros_like(params),
            "second": trees.zeros_like(params),
            "count": torch.zeros_like(next(iter(params.values())).sum()),
        }

    def step(params: Params, grads: Params, slots: Tree, ctx: Context) -> tuple[Params, Tree]:
        rule = ctx.rule
        if weight_decay:
            if decoupled:
                params = trees.scale(params, 1 - rule["lr"] * rule["weight_decay"])
            else:
                grads = trees.axpy(rule["weight_decay"], params, grads)
        count = slots["count"] + 1
        first = trees.lerp(slots["first"], grads, 1 - rule["beta1"])
        beta2, rest, eps = rule["beta2"], 1 - rule["beta2"], rule["eps"]
        second = trees.map(lambda v, g: beta2 * v + rest * g * g, slots["second"], grads)
        size = rule["lr"] / (1 - rule["beta1"] ** count)
        correction = torch.sqrt(1 - beta2**count)
        params = trees.map(lambda w, m, v: w - size * m / (torch.sqrt(v) / correction + eps), params, first, second)
        return params, {"first": first, "second": second, "count": count}

    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return Optimiser(name, numbers, init, step)
