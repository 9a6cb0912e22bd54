"""Compiles graphs of tensor operations, and functions that many layers call."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from remanence.core.preparation import COMPILING, announce
from remanence.kernels.torch_internals import compile_inductor, make_fx

# by function, its numbers, and the shapes, strides and dtypes of its tensors
_compiled: dict[Any, Callable[..., Any]] = {}


def compiler_options() -> dict[str, Any] | None:
    """Options for the compiler. A worker process compiles in its own thread: the compiler's
    threads exist only in the process it was forked from, and it would wait for them forever.
    """
    return {"compile_threads": 1} if multiprocessing.parent_process() is not None else None


def compile_graph(graph: GraphModule) -> Callable[..., Any]:
    """A function of tensors of fixed shapes, compiled once for each layout of its inputs.

    On a CPU it skips torch.compile, whose guards take a twelfth of a LeNet's step. On CUDA steps
    are captured, so guards cost nothing, and torch.compile caches more between processes.
    """
    guarded = torch.compile(graph, dynamic=False, options=compiler_options())
    by_layout = dict[Any, Callable[..., Any]]()

    def call(*tensors: Tensor) -> Any:
        layout = tuple([tensor.stride() for tensor in tensors])
        if layout not in by_layout:
            announce(COMPILING)
            on_cuda = any(tensor.is_cuda for tensor in tensors)
            # the compiler changes its argument, so it gets a copy
            by_layout[layout] = (
                guarded
                if on_cuda
                else compile_inductor(copy.copy(graph), tensors, compiler_options())
            )
        return by_layout[layout](*tensors)

    return call


def call_compiled(function: Callable[..., Tensor], *tensors: Tensor, **numbers: int) -> Tensor:
    """function(*tensors, **numbers), compiled once for each set of shapes, strides and dtypes."""
    key = (
        function,
        *numbers.items(),
        *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
    )
    if key not in _compiled:
        announce(COMPILING)
        graph = make_fx(lambda *tensors: function(*tensors, **numbers))(*tensors)
        _compiled[key] = compile_inductor(graph, tensors, compiler_options())
    result: Tensor = _compiled[key](*tensors)
    return result
