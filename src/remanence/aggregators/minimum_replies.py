"""Robust aggregators and the least number of replies for which their guarantee holds.

An experiment whose cohorts are smaller is rejected before it starts; a round with fewer replies is
abandoned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from remanence.aggregators.coordinatewise import median_of, reduce_columns
from remanence.core.compose import ComposedMethod
from remanence.core.contexts import ServerContext
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.pytree import Params
from remanence.core.slots import Aggregate
from remanence.core.types import Reply

# (weights [k], replies, srv) -> delta
RobustUpdate = Callable[[Tensor, Reply, ServerContext], Params]


@dataclass(frozen=True)
class MinimumReplies:
    """An aggregation that needs all replies of a round at once. It fills `Aggregate.partial`.

    Args:
        name: The part's name, for messages.
        minimum: The least number of replies for which the guarantee holds.
        reason: Where that number comes from, in words.
        cure: What else a user may change.
        weighted: Whether the clients' weights count.
        compute: Computes the update of the model.
    """

    name: str
    minimum: int
    reason: str
    cure: str
    weighted: bool
    compute: RobustUpdate

    def __call__(self, weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        if replies.num_clients < self.minimum:
            raise AggregationFailed(
                f"{self.name} needs {self.minimum} replies ({self.reason}) and"
                f" {replies.num_clients} came"
            )
        return self.compute(weights, replies, srv)

    def check_cohort(self, clients: int) -> None:
        """Raise `InputError` for an experiment that samples too few clients."""
        if clients < self.minimum:
            raise InputError(
                f"{self.name} needs {self.minimum} clients in a round ({self.reason}) and there"
                f" are {clients}:"
                f" sample more of them (clients.count, clients.sample) or {self.cure}"
            )


def aggregate_with_minimum(guarded: MinimumReplies) -> Aggregate:
    """The aggregation that a part fills its slot with."""
    return Aggregate(guarded, lambda delta, srv: delta, median_buffers)


def median_buffers(current: Params, sent: Params, weights: Tensor) -> Params:
    """The median of each buffer: a norm over the whole model would miss a single bad variance.

    Args:
        current: The server's buffers.
        sent: The clients' buffers, [k, ...].
        weights: [k], which a median does not use.
    """
    return current | reduce_columns(median_of, sent)


def minimum_of(method: ComposedMethod) -> MinimumReplies | None:
    """The method's aggregation if it is robust; else None."""
    part = method.part_filling("aggregate")
    found = None if part is None or part.aggregate is None else part.aggregate.partial
    return found if isinstance(found, MinimumReplies) else None


def check_cohort(method: ComposedMethod, clients: int) -> None:
    """Raise `InputError` for a robust aggregation that gets too few replies, or would ignore the
    weights of another part.
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
