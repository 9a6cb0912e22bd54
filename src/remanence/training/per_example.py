"""The gradient of every row by itself: what privacy of single examples is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remanence.core import pytree, rng
from remanence.core.errors import InputError
from remanence.core.pytree import Params
from remanence.core.slots import Context, PerExampleGrad
from remanence.core.types import Batch

Objective = Callable[[Params, Batch], tuple[Tensor, Any]]


class HiddenStats:
    """In the place of a client's facts where one row is looked at alone."""

    def __getattr__(self, name: str) -> Tensor:
        raise InputError(
            f"the loss reads a fact of all of a client's rows ({name}), which a gradient"
            " of single rows does not protect: use another loss, or add dp_counts"
        )


def make_per_example_grad(
    objective_of: Callable[[Context, Tensor], Objective],
    penalize: Callable[[Params], Params],
    ctx: Context,
    shown: bool,
) -> PerExampleGrad:
    """The function `lent.each`.

    objective_of: (context, the row as a batch of one) -> the objective without penalties. penalize:
        the gradient of those. shown: may the loss read the client's facts, since a part shows them
        with noise?
    """

    def each(params: Params, batch: Batch) -> tuple[Params, Params]:
        alone = ctx if shown else ctx._replace(stats=HiddenStats())  # type: ignore[arg-type]

        def of_row(
            params: Params, x: Tensor, y: Tensor, id: Tensor, number: Tensor
        ) -> tuple[Tensor, Any]:
            row = Batch(
                x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(batch.weight[:1]), id.unsqueeze(0)
            )
            now = alone._replace(key=rng.fold_in(ctx.key, number))  # a dropout mask of its own
            return objective_of(now, row.x)(params, row)

        numbers = torch.arange(len(batch.weight), device=batch.weight.device)
        mapped = torch.func.vmap(torch.func.grad(of_row, has_aux=True), in_dims=(None, 0, 0, 0, 0))
        rows: Params = mapped(params, batch.x, batch.y, batch.ids, numbers)[0]
        return rows, penalize(params)

    return each


def no_regularizer(params: Params) -> Params:
    return pytree.zeros_like(params)
