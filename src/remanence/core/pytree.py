"""Arithmetic on trees of tensors.

A tree is a dictionary whose values are tensors or trees; a model's parameters are a flat one. All
functions return new trees and leave their arguments unchanged. Functions of two trees use the names
of the first one; other names of the second are ignored, such as those of frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]  # values: Tensor | Tree
Params = dict[str, Tensor]

SEPARATOR = "/"


def map(
    function: Callable[..., Tensor], tree: Mapping[str, Any], *others: Mapping[str, Any]
) -> Tree:
    """Apply `function` to the tensors with the same path in all trees."""
    return {
        name: map(function, value, *(other[name] for other in others))
        if isinstance(value, Mapping)
        else function(value, *(other[name] for other in others))
        for name, value in tree.items()
    }


def add(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    return map(torch.add, a, b)


def sub(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    return map(torch.sub, a, b)


def scale(tree: Mapping[str, Any], factor: float | Tensor) -> Tree:
    return map(lambda x: x * factor, tree)


def axpy(factor: float | Tensor, x: Mapping[str, Any], y: Mapping[str, Any]) -> Tree:
    """factor * x + y, over the names of x."""
    return map(lambda a, b: factor * a + b, x, y)


def lerp(a: Mapping[str, Any], b: Mapping[str, Any], share: float | Tensor) -> Tree:
    """(1 - share) * a + share * b."""
    rest = 1 - share
    return map(lambda u, v: rest * u + share * v, a, b)


def dot(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tensor:
    """The inner product over all tensors."""
    return torch.stack([(x * y).sum() for x, y in _pairs(a, b)]).sum()


def squared_norm(tree: Mapping[str, Any]) -> Tensor:
    return dot(tree, tree)


def zeros_like(tree: Mapping[str, Any]) -> Tree:
    return map(torch.zeros_like, tree)


def where(condition: Tensor, a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    """`a` where the scalar condition holds, else `b`; usable inside vmap, where `if` is not."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def weighted_sum(weights: Tensor, stacked: Mapping[str, Any]) -> Tree:
    """sum_k weights[k] * tree[k] over the leading axis. weights: [k]."""
    # a matrix product could use tf32
    return map(lambda x: (weights.to(x).reshape(-1, *(1,) * (x.dim() - 1)) * x).sum(dim=0), stacked)


def stack(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """Stack trees of the same structure: every tensor gains a leading axis."""
    return map(lambda *tensors: torch.stack(tensors), trees[0], *trees[1:])


def concatenate(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """Stacked trees joined along their leading axis."""
    if len(trees) == 1:
        return dict(trees[0])
    return map(lambda *tensors: torch.cat(tensors), trees[0], *trees[1:])


def take(stacked: Mapping[str, Any], index: int | slice | Tensor) -> Tree:
    """One member of a stack (an integer) or a smaller stack (a slice or a tensor of indices)."""
    return map(lambda x: x[index], stacked)


def broadcast(tree: Mapping[str, Any], count: int) -> Tree:
    """The same tree `count` times, without copying."""
    return map(lambda x: x.expand(count, *x.shape), tree)


def to(tree: Mapping[str, Any], device: torch.device | str) -> Tree:
    return map(lambda x: x.to(device), tree)


def detach(tree: Mapping[str, Any]) -> Tree:
    return map(torch.detach, tree)


def clone(tree: Mapping[str, Any]) -> Tree:
    return map(torch.clone, tree)


def select_keys(tree: Mapping[str, Any], names: Iterable[str]) -> Tree:
    """The part of a flat tree with these names."""
    return {name: tree[name] for name in names}


def flatten(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """One level of names.

    >>> flatten({"a": {"b": torch.zeros(1)}})
    {'a/b': tensor([0.])}
    """
    return dict(_walk(tree, ""))


def unflatten(flat: Mapping[str, Tensor]) -> Tree:
    """The inverse of `flatten`."""
    tree: Tree = {}
    for path, tensor in flat.items():
        *folders, name = path.split(SEPARATOR)
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = tensor
    return tree


def nbytes(tree: Mapping[str, Any]) -> int:
    """The bytes of all tensors."""
    return sum(x.numel() * x.element_size() for x in leaves(tree))


def leaves(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def finite(stacked: Mapping[str, Any], count: int) -> Tensor:
    """Whether each member of a stack has finite numbers only. -> bool [count]"""
    good: Tensor | None = None
    for x in leaves(stacked):
        if x.is_floating_point():
            these = torch.isfinite(x).reshape(count, -1).all(dim=1)
            good = these if good is None else good & these
    return torch.ones(count, dtype=torch.bool) if good is None else good.cpu()


def _walk(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in tree.items():
        if SEPARATOR in name:
            raise ValueError(
                f"the name {name!r} holds {SEPARATOR!r}, which separates the levels of a tree"
            )
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}{SEPARATOR}")
        else:
            yield f"{prefix}{name}", value


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for name, value in a.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, b[name])
        else:
            yield value, b[name]


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The mean over the examples of weight above 0; `where` because 0 * NaN is NaN."""
    return torch.where(weight > 0, weight * values, torch.zeros_like(values)).sum() / weight.sum()
