"""Aggregators that promise something: how many replies the promise takes, and what happens where
there are fewer.

A robust aggregator that becomes weaker when clients drop out protects no one. So each knows the
least number of replies for which it holds: an experiment that can never reach it is
refused before it starts, and a round that does not is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from remanence.aggregators.coordinatewise import median_of, reduce_columns
from remanence.core.compose import ComposedMethod
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.pytree import Params
from remanence.core.slots import Aggregate, ServerContext
from remanence.core.types import Reply

RobustRule = Callable[
    [Tensor, Reply, ServerContext], Params
]  # (weights [k], replies, srv) -> delta


@dataclass(frozen=True)
class MinimumReplies:
    """A way to combine the replies of a round, seen all at once. It stands where
    `Aggregate.partial` stands.
    """

    name: str
    minimum: int  # replies for which the promise holds
    why: str  # where that number comes from, in words
    cure: str  # what else a user may change
    weighted: bool  # do the clients' weights count?
    rule: RobustRule

    def __call__(self, weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        if replies.num_clients < self.minimum:
            raise AggregationFailed(
                f"{self.name} needs {self.minimum} replies ({self.why}) and"
                f" {replies.num_clients} came"
            )
        return self.rule(weights, replies, srv)

    def check_cohort(self, clients: int) -> None:
        """Refuse an experiment whose rounds ask too few clients."""
        if clients < self.minimum:
            raise InputError(
                f"{self.name} needs {self.minimum} clients in a round ({self.why}) and there"
                f" are {clients}:"
                f" ask more of them (clients.count, clients.sample) or {self.cure}"
            )


def aggregate_with_minimum(guarded: MinimumReplies) -> Aggregate:
    """The slot of a part, filled."""
    return Aggregate(guarded, lambda delta, srv: delta, median_buffers)


def median_buffers(current: Params, sent: Params, weights: Tensor) -> Params:
    """Statistics and counters under any of these aggregators: the median of each, because a norm
    over the whole model would not see a single bad variance.

    current: [...]; sent: [k, ...]; weights: [k], claims that a median does not need
    """
    return current | reduce_columns(median_of, sent)


def minimum_of(method: ComposedMethod) -> MinimumReplies | None:
    """The promise of a method's aggregator, where it makes one."""
    owner = method.part_filling("aggregate")
    found = None if owner is None or owner.aggregate is None else owner.aggregate.partial
    return found if isinstance(found, MinimumReplies) else None


def check_cohort(method: ComposedMethod, clients: int) -> None:
    """Refuse a method whose aggregator cannot keep its promise with this number of clients in a
    round, or that would ignore another part's weights.
    """
    guarded, weighs = minimum_of(method), method.part_filling("client_weights")
    if guarded is None:
        return
    guarded.check_cohort(clients)
    if weighs is not None and not guarded.weighted:
        raise InputError(
            f"{weighs.name} and {guarded.name} cannot be combined: {guarded.name} counts"
            f" every client alike, so the weights of {weighs.name} would do"
            " nothing; use norm_clip or geometric_median, or leave one of them out"
        )
