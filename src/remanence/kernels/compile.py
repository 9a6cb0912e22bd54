"""How graphs of tensor operations are compiled, and parts of a step that are compiled once for
all the places where they stand.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

# by a function, its numbers, and the form of its tensors
_known: dict[Any, Callable[..., Any]] = {}


def compiler_options() -> dict[str, Any] | None:
    """A worker process compiles in its own thread: the compiler's threads stayed in the process
    it was forked from, and would be waited for without end.
    """
    return {"compile_threads": 1} if multiprocessing.parent_process() is not None else None


def compile_graph(graph: GraphModule) -> Callable[..., Any]:
    """A function of tensors of fixed shapes, compiled when they come in a layout for the first
    time.

    torch.compile finds out by guards of its own whether a layout is known, which takes a twelfth of
    a LeNet's step on a CPU. On CUDA steps are recorded, so that this costs nothing, and it
    remembers more of what it compiled from one process to the next.
    """
    guarded, known = (
        torch.compile(graph, dynamic=False, options=compiler_options()),
        dict[Any, Callable[..., Any]](),
    )

    def call(*tensors: Tensor) -> Any:
        if any(tensor.is_cuda for tensor in tensors):
            return guarded(*tensors)
        layout = tuple([tensor.stride() for tensor in tensors])
        if layout not in known:  # from a copy: the compiler changes what it is given
            known[layout] = torch._inductor.compile(
                copy.copy(graph), list(tensors), compiler_options()
            )
        return known[layout](*tensors)

    return call


def call_compiled(function: Callable[..., Tensor], *tensors: Tensor, **numbers: int) -> Tensor:
    """function(*tensors, **numbers), compiled when tensors of a form come for the first time."""
    form = (
        function,
        *numbers.items(),
        *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
    )
    if form not in _known:
        graph = make_fx(lambda *tensors: function(*tensors, **numbers))(*tensors)
        _known[form] = torch._inductor.compile(graph, list(tensors), compiler_options())
    answer: Tensor = _known[form](*tensors)
    return answer
