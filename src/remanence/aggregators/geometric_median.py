"""Geometric median: the point with the smallest sum of distances to all replies.

Pillutla, Kakade and Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on
Signal Processing 2022 (RFA), by the smoothed Weiszfeld algorithm. A reply far away pulls the mean
in proportion to its distance, and the geometric median by its direction alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from remanence.aggregators.coordinatewise import distances_from, reduce_columns, weighted_median
from remanence.aggregators.minimum_replies import MinimumReplies, aggregate_with_minimum
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ServerContext
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Reply


@part
def geometric_median(
    *, iterations: int = 100, tolerance: float = 1e-6, weighted: bool = True
) -> Part:
    """argmin_v sum_i w_i ||v - y_i||, by v <- sum_i b_i y_i / sum_i b_i with b_i = w_i / max(nu,
    ||v - y_i||).

    Withstands hostile replies with less than half of the weight, so no client may hold half of it.
    The paper starts at the mean and takes nu = 1e-6; here v starts at the weighted median of each
    coordinate, which no minority can move far, and nu is halved from the median distance from there
    down to `tolerance` times that: the result then does not depend on the scale of a model, and v
    does not stick at a reply that it happens to start from.

    Args:
        iterations: Iterations at most.
        tolerance: Stop after a step shorter than this number of median distances.
        weighted: Whether w_i are the clients' weights, which are numbers of examples unless a part
            replaces them; otherwise all are equal.
    """
    check_range(iterations >= 1, "geometric_median", "iterations", "of at least 1", iterations)
    check_range(
        0 < tolerance < 1, "geometric_median", "tolerance", "above 0 and below 1", tolerance
    )
    if not isinstance(weighted, bool):
        raise InputError(f"geometric_median: weighted must be true or false, not {weighted!r}")

    def minimize_distances(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        if not weighted:
            weights = torch.ones_like(weights) / len(weights)
        elif float(weights.max()) >= 0.5:
            client = int(replies.client[weights.argmax()])
            raise AggregationFailed(
                f"geometric_median: client {client} has {float(weights.max()):.0%} of the"
                " weight and would decide alone;"
                " geometric_median(weighted=false) weights all equally, and round.weight_cap"
                " limits the weights that clients claim"
            )
        return find_geometric_median(weights, replies.delta(srv.start), iterations, tolerance)

    guarded = MinimumReplies(
        "geometric_median",
        3,
        "of fewer, one hostile reply is no minority",
        "take the mean (fedavg)",
        weighted,
        minimize_distances,
    )
    return Part(
        "geometric_median",
        static=("iterations", "tolerance", "weighted"),
        aggregate=aggregate_with_minimum(guarded),
    )


def find_geometric_median(
    weights: Tensor, stacked: Params, iterations: int, tolerance: float
) -> Params:
    """Minimize the weighted sum of distances to k models.

    Args:
        weights: [k], summing to 1.
        stacked: The models, [k, ...].
        iterations: Iterations at most.
        tolerance: Stop after a step shorter than this number of median distances.
    """
    at = reduce_columns(lambda values: weighted_median(values.double(), weights), stacked)
    away = distances_from(at, stacked)  # [k]
    scale = float(weighted_median(away.unsqueeze(1), weights))
    # with half of the weight in one point, that point is the minimum
    for step in range(iterations if scale > 0 else 0):
        nu = scale * max(0.5**step, tolerance)
        pull = weights / away.clamp(min=nu)
        before, at = at, reduce_columns(functools.partial(average, pull / pull.sum()), stacked)
        moved = float(pytree.squared_norm(pytree.sub(at, before)).sqrt())
        if moved <= tolerance * scale and nu <= tolerance * scale:
            break
        away = distances_from(at, stacked)
    return pytree.map(lambda v, x: v.to(x.dtype), at, stacked)


def average(shares: Tensor, values: Tensor) -> Tensor:
    """The mean of values [k, c] with shares [k]. -> [c] float64"""
    return (shares.unsqueeze(1) * values.double()).sum(dim=0)
