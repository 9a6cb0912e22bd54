"""CUDA graphs of any function, and trees of tensors at fixed places in memory, which is what such graphs read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def clone_tree(*values: Any) -> Any:
    """The same trees in memory of their own."""
    return pytree.tree_map_only(Tensor, torch.clone, values)


def signature(tree: Any) -> Any:
    """Names, shapes and types of all tensors of a tree; whatever else is in it as it is."""
    leaves, names = pytree.tree_flatten(tree)
    return names, [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]


def copy_tree(memory: Any, values: Any) -> None:
    """The tensors of one tree into those of another of the same form."""
    pairs = zip(pytree.tree_leaves(memory), pytree.tree_leaves(values), strict=True)
    here, there = zip(*((a, b) for a, b in pairs if isinstance(a, Tensor)), strict=True)
    copy_tensors(here, there)


def copy_tensors(memory: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Values into memory, each into its own. Some may lie in it themselves, as when a step hands on
    what it was given under another name: they are read before anything is written.
    """
    owners = {tensor.untyped_storage().data_ptr(): tensor for tensor in memory}
    fresh = []
    for place, value in zip(memory, values, strict=True):
        owner = owners.get(value.untyped_storage().data_ptr())
        unmoved = owner is place and (value.data_ptr(), value.stride()) == (
            place.data_ptr(),
            place.stride(),
        )
        fresh.append(value if owner is None or unmoved else value.clone())
    for place, value in zip(memory, fresh, strict=True):
        place.copy_(value)


def capture(
    compute: Callable[[], Any], take: Callable[[], Any], pool: Any = None
) -> Callable[[], None]:
    """A CUDA graph of `take`. `compute`, the same to no effect, comes first, in a stream of its
    own: libraries choose kernels, the compiler finishes.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(here)
    with torch.cuda.stream(aside), cudnn_benchmark():
        for _ in range(2):
            compute()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), cudnn_benchmark():
        take()

    # a graph reads memory that only what it was made from keeps alive
    def replay(needed: Any = take) -> None:
        graph.replay()

    return replay


@contextlib.contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Shapes recur, so it pays to let cuDNN try its algorithms; not where results must repeat
    bit by bit.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
