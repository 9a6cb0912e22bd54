"""Adam and AdamW as torch.optim has them."""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.core.contexts import Context
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Optimizer


def adam(
    *,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; weight decay
    enters the gradient.

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squared gradients.
        eps: Added to the root of that mean.
        weight_decay: Factor of the weights that are added to the gradient.
    """
    return _adam("adam", lr, beta1, beta2, eps, weight_decay, decoupled=False)


def adamw(
    *,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019: weight decay
    acts on the weights.

    Args:
        lr: Learning rate.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squared gradients.
        eps: Added to the root of that mean.
        weight_decay: A step reduces the weights by lr * weight_decay times themselves.
    """
    return _adam("adamw", lr, beta1, beta2, eps, weight_decay, decoupled=True)


def _adam(
    name: str,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> Optimizer:
    check_range(lr > 0, name, "lr", "above 0", lr)
    check_range(0 <= beta1 < 1, name, "beta1", "from 0 to below 1", beta1)
    check_range(0 <= beta2 < 1, name, "beta2", "from 0 to below 1", beta2)
    check_range(eps > 0, name, "eps", "above 0", eps)
    check_range(weight_decay >= 0, name, "weight_decay", "of at least 0", weight_decay)

    def init(params: Params) -> Tree:
        zeros = torch.zeros_like(flatten(params))
        one = torch.ones_like(zeros[0])
        return {
            "first": zeros,
            "second": zeros.clone(),
            "beta1_power": one,
            "beta2_power": one.clone(),
        }

    def step(params: Params, grads: Params, slots: Tree, ctx: Context) -> tuple[Params, Tree]:
        hparams = ctx.optimizer_hparams
        w, g = flatten(params), flatten({name: grads[name] for name in params})
        if weight_decay:
            if decoupled:
                w = w * (1 - hparams["lr"] * hparams["weight_decay"])
            else:
                g = hparams["weight_decay"] * w + g
        # powers are updated from step to step: the compiler would compute beta ** step again for
        # every few parameters
        beta1_power, beta2_power = (
            slots["beta1_power"] * hparams["beta1"],
            slots["beta2_power"] * hparams["beta2"],
        )
        first = torch.lerp(slots["first"], g, 1 - hparams["beta1"])
        second = torch.lerp(slots["second"], g * g, 1 - hparams["beta2"])
        # applied to two numbers, the step size and eps, instead of to all of `second`
        correction = torch.sqrt(1 - beta2_power)
        size = hparams["lr"] * correction / (1 - beta1_power)
        w = torch.addcdiv(w, -size * first, torch.sqrt(second) + hparams["eps"] * correction)
        return unflatten(w, params), {
            "first": first,
            "second": second,
            "beta1_power": beta1_power,
            "beta2_power": beta2_power,
        }

    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return Optimizer(name, numbers, init, step)


def flatten(params: Params) -> Tensor:
    """All parameters as one vector: a dozen operations in all instead of a dozen for each of them,
    which take most of the time of a small network's step.
    """
    return torch.cat([value.reshape(-1) for value in params.values()])


def unflatten(vector: Tensor, like: Params) -> Params:
    """The vector as parameters of these names and shapes."""
    parts = torch.split(vector, [value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
