"""A local step of one client, traced once and then run many times without Python."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from remanence.core.contexts import Context
from remanence.core.pytree import Params
from remanence.core.types import Batch
from remanence.kernels.torch_internals import torch_pytree
from remanence.kernels.trace import TracedFunction
from remanence.training.client_step import TrainState
from remanence.training.task import ClientIndices

Arguments = tuple[TrainState, Params, Batch, ClientIndices, Context]


class TracedStep(TracedFunction):
    """A local step of one client."""

    def run_steps(
        self, arguments: Arguments, step_inputs: Iterable[tuple[Batch, Tensor, Tensor]]
    ) -> tuple[TrainState, list[Tensor]]:
        """Run one step after the other.

        Arguments that are the same in all steps are flattened once, and the state stays a flat
        list from one step to the next.

        Args:
            arguments: Of the first step.
            step_inputs: Each step's batch, number and key.

        Returns:
            The state after the last step, and the loss of every step.
        """
        state, fixed, batch, rows, ctx = arguments
        leaves = torch_pytree.tree_leaves(arguments)
        first = len(torch_pytree.tree_leaves(state))
        at_batch = first + len(torch_pytree.tree_leaves(fixed))
        at_rows = at_batch + len(batch)
        at_ctx = at_rows + len(rows)
        at_step, at_key = (
            at_ctx + len(torch_pytree.tree_leaves(ctx[: Context._fields.index(name)]))
            for name in ("step", "key")
        )
        if torch_pytree.tree_structure((state, None)) != self.answer_form:
            raise TypeError("a local step changes the form of the state it passes to the next step")
        losses: list[Tensor] = []
        with torch.no_grad():
            # The first step's input gets the strides of its output, which is the second's input:
            # otherwise the compiler would run once for each.
            leaves[:first] = [
                _with_strides(leaf, stride)
                for leaf, stride in zip(leaves[:first], self.strides, strict=False)
            ]
            for step_batch, number, key in step_inputs:
                leaves[at_batch:at_rows] = step_batch
                leaves[at_step], leaves[at_key] = number, key
                answer = self.run(*[leaves[place] for place in self.places])
                leaves[:first] = answer[:first]
                losses.append(answer[first])
        return torch_pytree.tree_unflatten([*leaves[:first], losses[-1]], self.answer_form)[
            0
        ], losses


def _with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    # an expanded tensor has no memory of its own
    if not stride or 0 in stride or tensor.stride() == stride:
        return tensor
    return torch.empty_strided(
        tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
