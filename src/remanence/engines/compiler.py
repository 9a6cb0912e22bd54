"""What all that is compiled has in common, and parts of a step that are compiled once for all the places where they stand."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

_known: dict[Any, Callable[..., Any]] = {}  # by a function, its numbers, and the form of its tensors


def compiler_options() -> dict[str, Any] | None:
    """A worker process compiles in its own thread: the compiler's threads stayed in the process it was forked from, and would be waited for without end."""
    return {"compile_threads": 1} if multiprocessing.parent_process() is not None else None


def call_compiled(function: Callable[..., Tensor], *tensors: Tensor, **numbers: int) -> Tensor:
    """function(*tensors, **numbers), compiled when tensors of a form come for the first time."""
    form = (function, *numbers.items(), *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
    if form not in _known:
        graph = make_fx(lambda *tensors: function(*tensors, **numbers))(*tensors)
        _known[form] = torch._inductor.compile(graph, list(tensors), compiler_options())
    answer: Tensor = _known[form](*tensors)
    return answer
