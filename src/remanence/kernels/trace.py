"""A function traced once to a flat list of tensor operations, which is faster to call than the
Python function and can be compiled.

Python runs only while the function is traced, so everything that changes between calls must be an
argument. This holds for the local step of every method: hooks are pure functions that read the run
through their context alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from remanence.core.preparation import announce
from remanence.kernels import kernels_enabled, maxpool_backward, winograd
from remanence.kernels.compile import compile_graph
from remanence.kernels.torch_internals import make_fx, torch_pytree


class TracedFunction:
    """A function traced for arguments with the structure, shapes and dtypes of an example.

    Args:
        function: The function; its arguments and results are trees of tensors.
        example: Arguments to trace it with.
        compile: Whether the graph is compiled. The first time this takes tens of seconds; torch
            caches the result on disk.
    """

    def __init__(
        self, function: Callable[..., Any], example: tuple[Any, ...], compile: bool = False
    ):
        announce()
        leaves, structure = torch_pytree.tree_flatten(example)
        positions = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        result_structure: list[Any] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            arguments = torch_pytree.tree_unflatten(filled, structure)
            result, found = torch_pytree.tree_flatten(function(*arguments))
            result_structure[:] = [found]
            return result

        # detach() makes a tensor that occurs twice two inputs: before the first step the parameters
        # are also those of the received model, but later they differ
        graph = make_fx(flat, decompositions() if compile else None)(
            *(leaves[position].detach() for position in positions)
        )
        self.places = [
            position for position, used in zip(positions, prune_inputs(graph), strict=True) if used
        ]
        self.kinds = [_kind(leaves[position]) for position in self.places]
        self.form, self.answer_form = structure, result_structure[0]
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        self.strides = [_stride_of(result) for result in results]
        self.run: Any = compile_graph(graph) if compile else graph
        leaves = []  # free the example

    def __call__(self, *arguments: Any) -> Any:
        leaves = torch_pytree.tree_leaves(arguments)
        with torch.no_grad():
            return torch_pytree.tree_unflatten(
                self.run(*(leaves[place] for place in self.places)), self.answer_form
            )

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the arguments have the structure, shapes and dtypes of the example, as far as
        the function reads them.
        """
        leaves, structure = torch_pytree.tree_flatten(arguments)
        return (
            structure == self.form and [_kind(leaves[place]) for place in self.places] == self.kinds
        )


def decompositions() -> dict[Any, Any]:
    """Replacements for operations that the compiler makes slow."""
    if not kernels_enabled():
        return {}
    return {**maxpool_backward.gradients(), **winograd.convolutions()}


def prune_inputs(graph: GraphModule) -> list[bool]:
    """Remove inputs that nothing reads, since each one costs time in every call. -> which remain"""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [bool(node.users) for node in inputs]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _stride_of(result: Any) -> tuple[int, ...]:
    """The strides of a graph's result; () if they are unknown."""
    value = getattr(result, "meta", {}).get("val")
    return tuple(value.stride()) if isinstance(value, Tensor) else ()


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
