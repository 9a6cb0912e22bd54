"""CUDA graphs, and trees of tensors at fixed addresses, which such graphs read and write."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remanence.core.preparation import announce
from remanence.kernels.torch_internals import torch_pytree


def clone_tree(*values: Any) -> Any:
    """Copies of the trees."""
    return torch_pytree.tree_map_only(Tensor, torch.clone, values)


def signature(tree: Any) -> Any:
    """The structure of a tree with the shapes and dtypes of its tensors. Other leaves stay as they
    are.
    """
    leaves, structure = torch_pytree.tree_flatten(tree)
    return structure, [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]


def copy_tree(targets: Any, values: Any) -> None:
    """Copy the tensors of one tree into those of another with the same structure."""
    pairs = zip(torch_pytree.tree_leaves(targets), torch_pytree.tree_leaves(values), strict=True)
    to, from_ = zip(*((a, b) for a, b in pairs if isinstance(a, Tensor)), strict=True)
    copy_tensors(to, from_)


def copy_tensors(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into the target at its position.

    A value may share memory with a target, for example if a step returns an input under another
    name: such values are copied before anything is overwritten.
    """
    owners = {tensor.untyped_storage().data_ptr(): tensor for tensor in targets}
    fresh = []
    for target, value in zip(targets, values, strict=True):
        owner = owners.get(value.untyped_storage().data_ptr())
        in_place = owner is target and (value.data_ptr(), value.stride()) == (
            target.data_ptr(),
            target.stride(),
        )
        fresh.append(value if owner is None or in_place else value.clone())
    for target, value in zip(targets, fresh, strict=True):
        target.copy_(value)


def capture(
    warmup: Callable[[], Any], step: Callable[[], Any], pool: Any = None
) -> Callable[[], None]:
    """Capture a function as a CUDA graph.

    Args:
        warmup: The same computation as `step` without side effects. It runs first, in a stream of
            its own, so that libraries choose their kernels and the compiler finishes.
        step: The function to capture.
        pool: The memory pool of the graph.

    Returns:
        A function that replays the graph.
    """
    announce()
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream), cudnn_benchmark():
        for _ in range(2):
            warmup()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with garbage_collection_off(), torch.cuda.graph(graph, pool=pool), cudnn_benchmark():
        step()

    # the default argument keeps the tensors alive that the graph reads
    def replay(needed: Any = step) -> None:
        graph.replay()

    return replay


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable Python's garbage collector. During a capture it could free an earlier graph, which
    then resets itself: CUDA forbids that while a stream is captured.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN time its algorithms, which pays off because shapes recur; not where deterministic
    algorithms are required.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
