"""A stack's local step as a flat list of tensor operations, written down once: faster to call than the Python it came from, and open to the compiler.

Whatever changes from step to step or round to round must come in through the arguments; the step's Python runs only while it is written down. That holds
for every method, because a part's functions are pure and see the run through their context alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from remanence.engines.steps import StepAll
from remanence.local import Progress, SplitRows
from remanence.trees import Params
from remanence.types import Batch, Context

Arguments = tuple[Progress, Params, Batch, SplitRows, Context]


def trace_step(step_all: StepAll, example: Arguments, compile: bool = False) -> StepAll:
    """The step for arguments of these shapes; `compile` fuses it, which takes tens of seconds the first time (torch keeps what it compiled)."""
    leaves, form = pytree.tree_flatten(example)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    answer_form: list[Any] = []

    def flat_step(*tensors: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        answer, found = pytree.tree_flatten(step_all(*pytree.tree_unflatten(filled, form)))
        answer_form[:] = [found]
        return answer

    graph = make_fx(flat_step)(*(leaves[place] for place in places))
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the example is not kept alive
    run = torch.compile(graph, dynamic=False) if compile else graph

    def step(*arguments: Any) -> tuple[Progress, Tensor]:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            answer: tuple[Progress, Tensor] = pytree.tree_unflatten(run(*tensors), answer_form[0])
        return answer

    return step
