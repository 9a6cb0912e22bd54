"""How the work of a round is divided among workers, and how their counts are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork, ExampleResults, PairCounts
from remanence.core.types import ClientStats


def balance(work: np.ndarray, workers: int) -> list[np.ndarray]:
    """Indices 0 .. n-1 in at most `workers` parts of about equal work, the largest part first.

    Items are assigned from the largest to the smallest, each to the part with the least work.

    >>> [places.tolist() for places in balance(np.array([1, 5, 2, 2, 1]), 2)]
    [[1, 4], [0, 2, 3]]
    """
    slices: list[list[int]] = [[] for _ in range(max(1, min(workers, len(work))))]
    loads = np.zeros(len(slices))
    for place in np.argsort(-work, kind="stable").tolist():
        least = int(np.argmin(loads))
        slices[least].append(place)
        loads[least] += max(int(work[place]), 1)  # an item without work still takes time
    return [
        np.sort(np.array(slices[number], dtype=np.int64))
        for number in np.argsort(-loads, kind="stable")
        if slices[number]
    ]


def join_pairs(counts: list[PairCounts], parts: list[np.ndarray]) -> PairCounts:
    """Counts of parts of the pairs as counts of all pairs, in their order."""
    back = torch.from_numpy(np.argsort(np.concatenate(parts), kind="stable"))
    confusion, loss = (
        torch.cat([each.confusion for each in counts])[back],
        torch.cat([each.loss for each in counts])[back],
    )
    results = [each.examples for each in counts]
    if results[0] is None:
        return PairCounts(confusion, loss)
    pair = np.concatenate(
        [
            part[result.pair]
            for part, result in zip(parts, results, strict=True)
            if result is not None
        ]
    )
    ids, right, margin = (
        np.concatenate([result[column] for result in results if result is not None])
        for column in (1, 2, 3)
    )
    order = np.lexsort((ids, pair))
    return PairCounts(
        confusion, loss, ExampleResults(pair[order], ids[order], right[order], margin[order])
    )


def split_evenly(count: int, num_parts: int) -> list[np.ndarray]:
    """Consecutive indices, in parts that are not empty."""
    return [part for part in np.array_split(np.arange(count), num_parts) if len(part)]


def subset_work(work: ClientWork, places: np.ndarray) -> Any:
    """The work of some clients; the model and the broadcast are in the store."""
    index = torch.from_numpy(places)
    stats = ClientStats(*(value[index] for value in work.stats))
    whole: Any = work
    return whole._replace(
        clients=work.clients[places],
        start=None,
        broadcast={},
        client_state=pytree.take(work.client_state, index),
        stats=stats,
    )
