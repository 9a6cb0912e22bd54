"""Reductions over the coordinates of many models, a few columns at a time, because sorting k large
models at once would take several times their memory.

Sums over coordinates are float64 for every dtype: the squared norm of a hostile model may overflow
float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Params

_VALUES_AT_ONCE = 1 << 23


def reduce_columns(function: Callable[[Tensor], Tensor], stacked: Params) -> Params:
    """Reduce k models to one, coordinate by coordinate.

    Args:
        function: [k, columns] -> [columns].
        stacked: The models, [k, ...].
    """
    return pytree.map(
        lambda x: torch.cat([function(piece) for piece in _cut(x)]).reshape(x.shape[1:]), stacked
    )


def squared_distances(stacked: Params) -> Tensor:
    """The squared distances between k models.

    Args:
        stacked: The models, [k, ...].

    Returns:
        [k, k] float64, exactly symmetric.
    """
    # from differences: norms and products lose all digits for models that are close, and may use
    # tf32
    exact = "donot_use_mm_for_euclid_dist"
    parts = [
        torch.cdist(piece.double(), piece.double(), compute_mode=exact).square()
        for x in stacked.values()
        for piece in _cut(x)
    ]
    return torch.stack(parts).sum(dim=0).nan_to_num(nan=math.inf, posinf=math.inf)


def distances_from(point: Params, stacked: Params) -> Tensor:
    """The distances of k models from one.

    Args:
        point: The model, [...].
        stacked: The models, [k, ...].

    Returns:
        [k] float64.
    """
    parts = [
        (piece.double() - center.double()).square().sum(dim=1)
        for name, x in stacked.items()
        for piece, center in zip(_cut(x), _cut(point[name].unsqueeze(0), len(x)), strict=True)
    ]
    return torch.stack(parts).sum(dim=0).sqrt()


def median_of(values: Tensor) -> Tensor:
    """The median of every column; of an even number of values the mean of the two in the middle,
    for integers the larger of the two.

    Args:
        values: [k, c].

    Returns:
        [c].

    >>> median_of(torch.tensor([[1.0, 5.0], [9.0, 6.0], [2.0, 7.0], [3.0, 8.0]]))
    tensor([2.5000, 6.5000])
    """
    ordered, count = values.sort(dim=0).values, len(values)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    # halved first: their sum could be infinite
    return high if count % 2 or not values.is_floating_point() else low / 2 + high / 2


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """In every column the smallest value that, with those below it, has half of the weight.

    Args:
        values: [k, c].
        weights: [k].

    Returns:
        [c].

    >>> weighted_median(torch.tensor([[1.0], [9.0], [2.0]]), torch.tensor([0.2, 0.5, 0.3]))
    tensor([2.])
    """
    ordered, order = values.sort(dim=0)
    # [k, c]; on CUDA `cumsum` of floats is not deterministic
    reached = torch.stack(list(itertools.accumulate(weights[order])))
    place = (reached < weights.sum() / 2).sum(dim=0).clamp(max=len(values) - 1)
    return ordered.gather(0, place.unsqueeze(0)).squeeze(0)


def _cut(x: Tensor, count: int = 0) -> Iterator[Tensor]:
    """Split a stack [k, ...] into pieces [k, columns], as narrow as for `count` models."""
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    return iter(torch.split(flat, max(1, _VALUES_AT_ONCE // max(1, count or len(x))), dim=1))
