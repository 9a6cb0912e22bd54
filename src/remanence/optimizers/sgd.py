"""Stochastic gradient descent, with momentum and weight decay as torch.optim.SGD has them."""

from __future__ import annotations

from remanence.core import pytree
from remanence.core.contexts import Context
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.ranges import check_range
from remanence.core.slots import Optimizer


def sgd(
    *, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """w <- w - lr * (g + weight_decay * w), through a velocity where there is momentum.

    Args:
        lr: Learning rate.
        momentum: Decay of the velocity; 0: none.
        weight_decay: Factor of the weights that are added to the gradient.
        nesterov: Whether to use Nesterov's momentum.
    """
    check_range(lr > 0, "sgd", "lr", "above 0", lr)
    check_range(0 <= momentum < 1, "sgd", "momentum", "from 0 to below 1", momentum)
    check_range(weight_decay >= 0, "sgd", "weight_decay", "of at least 0", weight_decay)
    if nesterov and momentum == 0:
        raise InputError("sgd: nesterov needs momentum: write sgd(momentum=0.9, nesterov=true)")

    def init(params: Params) -> Tree:
        return {"velocity": pytree.zeros_like(params)} if momentum else {}

    def step(params: Params, grads: Params, slots: Tree, ctx: Context) -> tuple[Params, Tree]:
        hparams = ctx.optimizer_hparams
        if weight_decay:
            grads = pytree.axpy(hparams["weight_decay"], params, grads)
        if momentum:
            velocity = pytree.axpy(hparams["momentum"], slots["velocity"], grads)
            slots = {"velocity": velocity}
            grads = pytree.axpy(hparams["momentum"], velocity, grads) if nesterov else velocity
        return pytree.axpy(-hparams["lr"], grads, params), slots

    return Optimizer(
        "sgd", {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, init, step
    )
