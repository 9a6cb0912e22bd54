"""The training loss of one client. The only place where losses of examples are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remanence.core.contexts import ClientOps, Context
from remanence.core.pytree import Params, weighted_mean
from remanence.core.types import Batch, ModelState, Output
from remanence.training.task import TrainingTask

# (params, batch) -> scalar loss, {"buffers": buffers after the forward pass, "loss": detached}
LossFn = Callable[[Params, Batch], tuple[Tensor, dict[str, Any]]]


def make_loss_fn(
    task: TrainingTask,
    fixed: Params,
    buffers: Params,
    ops: ClientOps,
    ctx: Context,
    regularized: bool = True,
    training: bool = True,
) -> LossFn:
    """The whole loss: the weighted mean of loss and loss terms, plus the regularizers.

    Args:
        task: The run's task.
        fixed: Parameters that this phase does not train.
        buffers: Buffers before the forward pass.
        ops: What the loss terms may call.
        ctx: The client's context in this step.
        regularized: Whether the regularizers are added.
        training: Whether the model is in training mode.

    Returns:
        A function of the trained parameters and a batch.
    """
    loss_hook = task.method.hook("loss")
    terms = task.method.hooks("loss_terms")
    regularizers = task.method.hooks("regularizers") if regularized else []

    def loss_fn(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        model = ModelState({**fixed, **params}, buffers)
        if training:
            out, new_buffers = task.model.apply(*model, batch.x, ctx.key)
        else:
            out, new_buffers = task.model.predict(model, batch.x), buffers
        losses = (cross_entropy if loss_hook is None else loss_hook)(out, batch, ctx)
        for term in terms:
            losses = losses + term(out, batch, ops, ctx)
        loss = weighted_mean(losses, batch.weight)
        for regularizer in regularizers:
            loss = loss + regularizer(params, ctx)
        return loss, {"buffers": new_buffers, "loss": loss.detach()}

    return loss_fn


def cross_entropy(out: Output, batch: Batch, ctx: Context) -> Tensor:
    """The default loss of each example; `batch.y` may hold soft targets."""
    return torch.nn.functional.cross_entropy(out.logits, batch.y, reduction="none")
