"""The private parts of torch that compiling in regions needs, beside `kernels/torch_internals.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from remanence.kernels.torch_internals import make_fx


def cache_misses() -> int:
    """How many graphs this process had to compile since torch's cache did not have them."""
    return int(counters["inductor"]["fxgraph_cache_miss"])


def fake_tensors(layouts: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """Tensors without memory. layouts: shape, stride, dtype and device of each"""
    with FakeTensorMode():
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in layouts
        ]


def trace_pure(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The same graph without operations in place, but for copies into its inputs at its end."""
    pure: GraphModule = make_fx(functionalize(graph), tracing_mode="fake")(*inputs)
    return pure


def propagate_layouts(graph: GraphModule, inputs: Sequence[Tensor]) -> dict[Node, Any]:
    """The value of each node, as a tensor without memory, from inputs in their real layout."""
    FakeTensorProp(graph, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    return {node: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
