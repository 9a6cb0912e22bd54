"""Coordinates of many models at once, a few columns at a time: sorting k large models whole would
take several times their memory.

Sums over coordinates are float64 whatever the parameters are: a hostile model may be so long that
its square has no float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Params

_VALUES_AT_ONCE = 1 << 23


def reduce_columns(function: Callable[[Tensor], Tensor], stacked: Params) -> Params:
    """From k models to one, coordinate by coordinate. function: [k, columns] -> [columns];
    stacked: [k, ...]
    """
    return pytree.map(
        lambda x: torch.cat([function(piece) for piece in _cut(x)]).reshape(x.shape[1:]), stacked
    )


def squared_distances(stacked: Params) -> Tensor:
    """Between every two of k models. stacked: [k, ...] -> [k, k] float64, symmetric to the last
    bit
    """
    # differences, not norms and products: these lose all digits where models lie close together,
    # and could use tf32
    exact = "donot_use_mm_for_euclid_dist"
    parts = [
        torch.cdist(piece.double(), piece.double(), compute_mode=exact).square()
        for x in stacked.values()
        for piece in _cut(x)
    ]
    return torch.stack(parts).sum(dim=0).nan_to_num(nan=math.inf, posinf=math.inf)


def distances_from(point: Params, stacked: Params) -> Tensor:
    """Of k models from one. point: [...]; stacked: [k, ...] -> [k] float64"""
    parts = [
        (piece.double() - center.double()).square().sum(dim=1)
        for name, x in stacked.items()
        for piece, center in zip(_cut(x), _cut(point[name].unsqueeze(0), len(x)), strict=True)
    ]
    return torch.stack(parts).sum(dim=0).sqrt()


def median_of(values: Tensor) -> Tensor:
    """The median of every column; of an even number of values, the mean of the two in the middle,
    or the higher one of whole numbers.

    >>> median_of(torch.tensor([[1.0, 5.0], [9.0, 6.0], [2.0, 7.0], [3.0, 8.0]]))
    tensor([2.5000, 6.5000])

    values: [k, c] -> [c]
    """
    ordered, count = values.sort(dim=0).values, len(values)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    # halved first: their sum could be infinite
    return high if count % 2 or not values.is_floating_point() else low / 2 + high / 2


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """In every column the smallest value that, with those below it, has half of the weight.

    >>> weighted_median(torch.tensor([[1.0], [9.0], [2.0]]), torch.tensor([0.2, 0.5, 0.3]))
    tensor([2.])

    values: [k, c]; weights: [k] -> [c]
    """
    ordered, order = values.sort(dim=0)
    reached = weights[order].cumsum(dim=0)  # [k, c]
    place = (reached < weights.sum() / 2).sum(dim=0).clamp(max=len(values) - 1)
    return ordered.gather(0, place.unsqueeze(0)).squeeze(0)


def _cut(x: Tensor, count: int = 0) -> Iterator[Tensor]:
    """A stack as pieces of a few columns, as narrow as for `count` models. x: [k, ...] -> each
    [k, columns]
    """
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    return iter(torch.split(flat, max(1, _VALUES_AT_ONCE // max(1, count or len(x))), dim=1))
