"""All private and experimental parts of torch that Remanence uses. No other module uses any.

    make_fx            torch.fx.experimental.proxy_tensor, since torch 1.13: traces a function to
                       a graph of ATen operations, with replacements for some of them.
    compile_inductor   torch._inductor.compile, since torch 2.0: compiles such a graph without the
                       guards of torch.compile. torch keeps the result on disk only where it finds
                       a ShapeEnv (torch.fx.experimental.symbolic_shapes, since 2.0) in the
                       FakeTensorMode of a TracingContext (torch._guards, since 2.0).
    torch_pytree       torch.utils._pytree, since torch 1.8: nested tuples and dictionaries of
                       tensors as flat lists; torch.func and torch.export use it.
    foreach_copy_      torch._foreach_copy_, since torch 2.1: copies a list of tensors with one
                       kernel launch.
    has_pre_hooks      nn.Module._forward_pre_hooks, since torch 0.2: whether a module has hooks
                       that run before it.

Any release of torch may change them: pyproject.toml therefore gives torch an upper bound, the
newest version that was tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_pytree

__all__ = ["compile_inductor", "foreach_copy_", "has_pre_hooks", "make_fx", "torch_pytree"]


def compile_inductor(
    graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """Compile a graph for inputs of exactly these shapes, dtypes and strides, or load the result
    of an earlier process from torch's cache.
    """
    # sympy makes this import slow
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        return torch._inductor.compile(graph, list(inputs), options)  # type: ignore[no-any-return]


def foreach_copy_(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into the tensor at its position."""
    torch._foreach_copy_(to, values)


def has_pre_hooks(module: nn.Module) -> bool:
    """Whether hooks run before the module's forward pass."""
    return bool(module._forward_pre_hooks)
