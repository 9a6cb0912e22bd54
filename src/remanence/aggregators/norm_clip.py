"""Norm clipping: the mean of updates whose norms are limited.

Sun, Kairouz, Suresh and McMahan, "Can you really backdoor federated learning?", 2019. Every client
contributes, also those with rare classes, and each contribution is bounded; hostile clients are not
detected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remanence.aggregators.coordinatewise import distances_from, median_of
from remanence.aggregators.minimum_replies import MinimumReplies, aggregate_with_minimum
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ServerContext
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Reply


@part
def norm_clip(*, limit: float = 0.0) -> Part:
    """sum_i w_i min(1, limit / ||y_i - x||) (y_i - x): client i moves the model by w_i * limit at
    most, whatever it sends.

    The weights are claims: see round.weight_cap.

    Args:
        limit: The largest norm of an update; 0: the median norm of the round, which a hostile
            minority cannot move beyond the honest clients' and which needs three replies.
    """
    check_range(limit >= 0, "norm_clip", "limit", "of at least 0", limit)

    def clip_and_average(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        delta = replies.delta(srv.start)
        norms = distances_from(pytree.zeros_like(pytree.take(delta, 0)), delta)  # [k]
        return pytree.weighted_sum(weights * clip_factors(norms, limit), delta)

    minimum, reason = (
        (1, "one is enough") if limit else (3, "of fewer, one hostile reply sets the median")
    )
    guarded = MinimumReplies(
        "norm_clip",
        minimum,
        reason,
        "give a limit, such as norm_clip(limit=1)",
        True,
        clip_and_average,
    )
    return Part("norm_clip", static=("limit",), aggregate=aggregate_with_minimum(guarded))


def clip_factors(norms: Tensor, limit: float) -> Tensor:
    """The factor by which each update is scaled.

    Args:
        norms: Norms of the updates, [k].
        limit: The largest norm; 0: their median.

    Returns:
        [k].

    >>> clip_factors(torch.tensor([1.0, 2.0, 8.0]), limit=0.0)
    tensor([1.0000, 1.0000, 0.2500])
    """
    longest = (
        torch.full_like(norms, limit) if limit else median_of(norms.unsqueeze(1)).expand_as(norms)
    )
    return torch.where(norms > longest, longest / norms, 1.0)
