"""A local step of one client, traced: many of them one after the other without the Python they came from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from remanence.core.pytree import Params
from remanence.core.slots import Context
from remanence.core.types import Batch
from remanence.kernels.torch_internals import torch_pytree as pytree
from remanence.kernels.trace import TracedFunction
from remanence.training.client_step import TrainState
from remanence.training.task import ClientIndices

Arguments = tuple[TrainState, Params, Batch, ClientIndices, Context]


class TracedStep(TracedFunction):
    """A local step of one client."""

    def run_steps(
        self, arguments: Arguments, moments: Iterable[tuple[Batch, Tensor, Tensor]]
    ) -> tuple[TrainState, list[Tensor]]:
        """Steps one after the other, each with its batch, number and key. -> progress, the loss of
        every step

        What stays the same is taken apart once, and what a step hands to the next is not put
        together in between.
        """
        progress, fixed, batch, rows, ctx = arguments
        leaves = pytree.tree_leaves(arguments)
        first = len(pytree.tree_leaves(progress))
        at_batch = first + len(pytree.tree_leaves(fixed))
        at_ctx = at_batch + len(batch) + len(rows)
        at_step, at_key = (
            at_ctx + len(pytree.tree_leaves(ctx[: Context._fields.index(name)]))
            for name in ("step", "key")
        )
        if pytree.tree_structure((progress, None)) != self.answer_form:
            raise TypeError("a local step changes the form of what it hands to the next")
        losses: list[Tensor] = []
        with torch.no_grad():
            # the first step's input is laid out as its answer, which is the second's: else the
            # compiler would be called once for each
            leaves[:first] = [
                _lay_like(leaf, stride)
                for leaf, stride in zip(leaves[:first], self.strides, strict=False)
            ]
            for now, number, key in moments:
                leaves[at_batch : at_batch + len(now)], leaves[at_step], leaves[at_key] = (
                    now,
                    number,
                    key,
                )
                answer = self.run(*[leaves[place] for place in self.places])
                leaves[:first] = answer[:first]
                losses.append(answer[first])
        return pytree.tree_unflatten([*leaves[:first], losses[-1]], self.answer_form)[0], losses


def _lay_like(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    # what is spread out has no memory of its own to be laid into
    if not stride or 0 in stride or tensor.stride() == stride:
        return tensor
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
