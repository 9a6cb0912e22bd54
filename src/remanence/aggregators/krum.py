"""Krum and Multi-Krum: the replies that lie closest to their neighbors.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017. Whole models are chosen or excluded, so a client whose data differ
from the others' is easily taken for a hostile one: compare accuracies on rare classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remanence.aggregators.coordinatewise import squared_distances
from remanence.aggregators.minimum_replies import MinimumReplies, aggregate_with_minimum
from remanence.core import pytree
from remanence.core.compose import part
from remanence.core.contexts import ServerContext
from remanence.core.pytree import Params
from remanence.core.ranges import check_range
from remanence.core.slots import Part
from remanence.core.types import Reply


@part
def krum(*, byzantine: int = 1) -> Part:
    """The reply with the smallest sum of squared distances to its n - f - 2 closest others; ties go
    to the client with the lower number.

    Args:
        byzantine: f, the number of hostile replies to withstand; it needs n >= 2 f + 3 replies.
    """
    check_range(byzantine >= 0, "krum", "byzantine", "of at least 0", byzantine)

    def choose_one(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        return average_closest(replies, srv, byzantine, keep=1)

    guarded = MinimumReplies(
        "krum", 2 * byzantine + 3, "2 * byzantine + 3", "lower byzantine", False, choose_one
    )
    return Part("krum", static=("byzantine",), aggregate=aggregate_with_minimum(guarded))


@part
def multi_krum(*, byzantine: int = 1, keep: int = 0) -> Part:
    """The unweighted mean of the `keep` replies with the best scores of Krum.

    Args:
        byzantine: f, the number of hostile replies to withstand; it needs n >= 2 f + 3 replies.
        keep: m, at most n - f - 2, because a hostile reply may be among more; 0: n - f - 2.
    """
    check_range(byzantine >= 0, "multi_krum", "byzantine", "of at least 0", byzantine)
    check_range(keep >= 0, "multi_krum", "keep", "of at least 0", keep)

    def choose_some(weights: Tensor, replies: Reply, srv: ServerContext) -> Params:
        return average_closest(replies, srv, byzantine, keep or replies.num_clients - byzantine - 2)

    minimum, reason = max(
        (2 * byzantine + 3, "2 * byzantine + 3"), (keep + byzantine + 2, "keep + byzantine + 2")
    )
    guarded = MinimumReplies(
        "multi_krum", minimum, reason, "lower byzantine or keep", False, choose_some
    )
    return Part(
        "multi_krum", static=("byzantine", "keep"), aggregate=aggregate_with_minimum(guarded)
    )


def average_closest(replies: Reply, srv: ServerContext, byzantine: int, keep: int) -> Params:
    delta = replies.delta(srv.start)
    scores = sum_closest(squared_distances(delta), byzantine)
    chosen = torch.tensor(
        choose_lowest(scores.tolist(), replies.client.tolist(), keep), device=replies.client.device
    )
    return pytree.map(lambda x: x[chosen].mean(dim=0), delta)


def sum_closest(distances: Tensor, byzantine: int) -> Tensor:
    """Each reply's score: the sum of squared distances to its n - f - 2 closest others.

    Args:
        distances: Squared distances between replies, [n, n].
        byzantine: f.

    Returns:
        [n].

    >>> sum_closest(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), byzantine=0)
    tensor([1., 1., 4.])
    """
    itself, others = 1, len(distances) - byzantine - 2
    return distances.sort(dim=1).values[:, itself : itself + others].sum(dim=1)


def choose_lowest(scores: Sequence[float], clients: Sequence[int], keep: int) -> list[int]:
    """The positions of the `keep` lowest scores, in the order of clients. Two replies that are each
    other's closest tie exactly; the lower client number wins.

    >>> choose_lowest([1.0, 1.0, 4.0], [8, 3, 5], keep=1)
    [1]
    """
    best = sorted(range(len(scores)), key=lambda place: (scores[place], clients[place]))[:keep]
    return sorted(best, key=lambda place: clients[place])
