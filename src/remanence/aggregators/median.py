"""Coordinate-wise median and trimmed mean: extreme values of each coordinate are excluded.

Yin et al., "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018.
Each coordinate of the new model lies within the range of the honest clients'. What only a minority
has learned, such as a class that few clients hold, is extreme too and is also excluded.
"""

from __future__ import annotations

import math

from torch import Tensor

from remanence.aggregators.coordinatewise import median_of, reduce_columns
from remanence.aggregators.minimum_replies import MinimumReplies, aggregate_with_minimum
from remanence.core.compose import part
from remanence.core.contexts import ServerContext
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Reply


@part
def median() -> Part:
    """x_j <- x_j + median_i (y_ij - x_j) for every coordinate j; of an even number of replies, the
    mean of the two in the middle.

    It withstands any minority of hostile replies, and so needs at least three replies. All clients
    have the same weight, whatever number of examples they claim.
    """
    guarded = MinimumReplies(
        "median",
        3,
        "of fewer, one hostile reply is no minority",
        "take the mean (fedavg)",
        False,
        take_median,
    )
    return Part("median", aggregate=aggregate_with_minimum(guarded))


def take_median(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
    return reduce_columns(median_of, replies.delta(srv.start))


@part
def trimmed_mean(*, fraction: float = 0.1) -> Part:
    """For every coordinate, the mean without the floor(fraction * k) largest and as many smallest
    of k replies.

    It withstands that number of hostile replies. Fewer than 1 / fraction replies are not
    aggregated, because none would be cut. All clients have the same weight, whatever number of
    examples they claim.

    Args:
        fraction: Share cut at each end, above 0 and below a half.
    """
    check_range(0 < fraction < 0.5, "trimmed_mean", "fraction", "above 0 and below 0.5", fraction)

    def average_the_rest(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        cut = count_cut(replies.num_clients, fraction)
        return reduce_columns(lambda values: trim(values, cut), replies.delta(srv.start))

    least = math.ceil(1 / fraction - 1e-9)
    guarded = MinimumReplies(
        "trimmed_mean",
        least,
        "with fewer nothing is cut",
        "cut a larger fraction",
        False,
        average_the_rest,
    )
    return Part("trimmed_mean", static=("fraction",), aggregate=aggregate_with_minimum(guarded))


def count_cut(replies: int, fraction: float) -> int:
    """How many are cut at each end.

    >>> count_cut(100, 0.29)  # 0.29 * 100 is 28.999999999999996 in binary
    29
    """
    return math.floor(fraction * replies + 1e-9)


def trim(values: Tensor, cut: int) -> Tensor:
    """The mean of every column of values [k, c] without `cut` values at each end. -> [c]"""
    kept = values.sort(dim=0).values[cut : len(values) - cut]
    # a rounded mean of equal numbers may lie beyond them
    return kept.mean(dim=0).clamp(kept[0], kept[-1])
