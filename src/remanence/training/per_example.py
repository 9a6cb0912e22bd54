"""The gradient of every example by itself, which DP-SGD clips and adds noise to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remanence.core import rng
from remanence.core.contexts import Context, PerExampleGrad
from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.types import Batch
from remanence.privacy.label_dp import CURE
from remanence.training.loss import LossFn


class HiddenStats:
    """Replaces a client's statistics where the gradient of a single example is taken."""

    def __getattr__(self, name: str) -> Tensor:
        raise InputError(
            f"the loss reads a statistic of all of a client's examples ({name}), which"
            f" per-example gradients do not protect: use another loss, or {CURE}"
        )


def make_per_example_grad(
    loss_fn_at: Callable[[Context, Tensor], LossFn],
    regularizer_grad: Callable[[Params, Context], Params],
    ctx: Context,
    stats_are_private: bool,
) -> PerExampleGrad:
    """The function `ops.per_example_grad`.

    Args:
        loss_fn_at: Maps a context and the inputs of a batch to the loss without regularizers.
        regularizer_grad: Maps parameters and a context to the gradient of the regularizers.
        ctx: The client's context in this step.
        stats_are_private: Whether a part adds noise to the client's statistics; only then may
            the loss and the regularizers read them.
    """

    def per_example_grad(params: Params, batch: Batch) -> tuple[Params, Params]:
        stats: Any = ctx.stats if stats_are_private else HiddenStats()
        example_ctx = ctx._replace(stats=stats)

        def example_loss(
            params: Params, x: Tensor, y: Tensor, id: Tensor, position: Tensor
        ) -> tuple[Tensor, Any]:
            example = Batch(
                x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(batch.weight[:1]), id.unsqueeze(0)
            )
            # every example draws a dropout mask of its own
            own_ctx = example_ctx._replace(key=rng.fold_in(ctx.key, position))
            return loss_fn_at(own_ctx, example.x)(params, example)

        positions = torch.arange(len(batch.weight), device=batch.weight.device)
        grad_each = torch.func.vmap(
            torch.func.grad(example_loss, has_aux=True), in_dims=(None, 0, 0, 0, 0)
        )
        grads: Params = grad_each(params, batch.x, batch.y, batch.ids, positions)[0]
        return grads, regularizer_grad(params, example_ctx)

    return per_example_grad
