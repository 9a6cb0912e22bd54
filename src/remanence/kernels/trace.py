"""A step as a flat list of tensor operations, written down once: faster to call than the Python it
came from, and open to the compiler.

Whatever changes from step to step or round to round must come in through the arguments; the step's
Python runs only while it is written down. That holds for every method, because a part's functions
are pure and see the run through their context alone. The step may be that of a stack of clients or
of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from remanence.kernels import maxpool_backward, winograd
from remanence.kernels.compile import compile_graph


class TracedFunction:
    """A function for arguments of the form of an example; `compile` fuses it, which takes tens
    of seconds the first time (torch keeps what it compiled).
    """

    def __init__(
        self, function: Callable[..., Any], example: tuple[Any, ...], compile: bool = False
    ):
        leaves, form = pytree.tree_flatten(example)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        answer_form: list[Any] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            answer, found = pytree.tree_flatten(function(*pytree.tree_unflatten(filled, form)))
            answer_form[:] = [found]
            return answer

        # one tensor may stand at two places, as parameters do before the first step: told apart, or
        # the wrong one would be read later
        graph = make_fx(flat, decompositions() if compile else None)(
            *(leaves[place].detach() for place in places)
        )
        self.places = [
            place for place, used in zip(places, prune_inputs(graph), strict=True) if used
        ]
        self.kinds = [_kind(leaves[place]) for place in self.places]
        self.form, self.answer_form = form, answer_form[0]
        (answers,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        self.strides = [_stride_of(answer) for answer in answers]
        self.run: Any = compile_graph(graph) if compile else graph
        leaves = []  # the example is not kept alive

    def __call__(self, *arguments: Any) -> Any:
        leaves = pytree.tree_leaves(arguments)
        with torch.no_grad():
            return pytree.tree_unflatten(
                self.run(*(leaves[place] for place in self.places)), self.answer_form
            )

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Are these of the form of the example, as far as the function looks at them?"""
        leaves, form = pytree.tree_flatten(arguments)
        return form == self.form and [_kind(leaves[place]) for place in self.places] == self.kinds


def trace_step(
    step: Callable[..., Any], example: tuple[Any, ...], compile: bool = False
) -> TracedFunction:
    """Write the step of a stack down."""
    return TracedFunction(step, example, compile)


def decompositions() -> dict[Any, Any]:
    """What is written down for the compiler in place of operations that are faster in other
    ways.
    """
    return {**maxpool_backward.gradients(), **winograd.convolutions()}


def prune_inputs(graph: GraphModule) -> list[bool]:
    """Take away the inputs that nothing reads: each costs something at every call, and most of
    a context is not read. -> which were kept
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [bool(node.users) for node in inputs]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _stride_of(answer: Any) -> tuple[int, ...]:
    """How what a graph answers will lie in memory; () where that is not known."""
    value = getattr(answer, "meta", {}).get("val")
    return tuple(value.stride()) if isinstance(value, Tensor) else ()


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
