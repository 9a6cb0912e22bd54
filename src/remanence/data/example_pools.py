"""Pools of examples that drifting clients draw from.

Concepts that select the same examples share one pool. A pool is split once into training and
validation examples, so no example that any client validates on is ever trained on by any client,
in any view. A pool hands out all its examples before it repeats one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remanence.core.rng import Key
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit
from remanence.data.splits import draw_stratified


class SplitSizes(NamedTuple):
    """The number of training and validation examples of a client."""

    train: int
    valid: int


class ExamplePool:
    """Examples that are drawn without replacement, and reshuffled when none are left."""

    def __init__(self, indices: np.ndarray, key: Key):
        self.indices, self.key = indices, key
        self.order, self.passes, self.drawn = indices[:0], 0, 0

    def draw(self, count: int) -> np.ndarray:
        """Draw `count` different examples, ascending; the pool must hold that many."""
        taken, self.order = self.order[:count], self.order[count:]
        if len(taken) < count:
            order = self.indices[self.key.fold_in(self.passes).permutation(len(self.indices))]
            again = np.isin(order, taken)
            # what this client has just drawn comes last
            order = np.concatenate([order[~again], order[again]])
            missing = count - len(taken)
            taken = np.concatenate([taken, order[:missing]])
            self.order, self.passes = order[missing:], self.passes + 1
        self.drawn += count
        return np.sort(taken)


def find_pools(
    concepts: Sequence[Concept], split: DatasetSplit, indices: np.ndarray
) -> tuple[list[np.ndarray], list[int]]:
    """Find the distinct sets of examples that concepts select.

    Returns:
        (the examples of each pool, the pool of each concept)
    """
    pools: list[np.ndarray] = []
    numbers: dict[tuple[object, object], int] = {}
    for concept in concepts:
        if (concept.labels, concept.domain) not in numbers:
            selected = np.intersect1d(concept.select(split), indices)
            same = [number for number, pool in enumerate(pools) if np.array_equal(pool, selected)]
            numbers[concept.labels, concept.domain] = same[0] if same else len(pools)
            pools += [] if same else [selected]
    return pools, [numbers[concept.labels, concept.domain] for concept in concepts]


def split_pools(
    split: DatasetSplit, pools: Sequence[np.ndarray], sizes: SplitSizes, key: Key
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split all pools into training and validation examples, in the ratio of `sizes`.

    One split for all pools, stratified by label and by the pools an example is in.

    Returns:
        (training, validation) examples of each pool.
    """
    indices = np.unique(np.concatenate(pools))
    labels, held = split.y[indices], np.zeros(len(split), dtype=bool)
    # strata are pools, not groups: groups can have a single example of a label
    member = np.zeros(len(indices), dtype=np.int64)
    for pool in pools:
        member = np.unique(2 * member + np.isin(indices, pool), return_inverse=True)[1]
    if sizes.valid and len(indices):
        share = len(indices) * sizes.valid / (sizes.train + sizes.valid)
        count = min(len(indices) - 1, max(1, math.floor(share + 0.5)))
        strata = member * (int(labels.max()) + 1) + labels
        held[indices[draw_stratified(strata, count, key.fold_in("validation"))]] = True
    return [(pool[~held[pool]], pool[held[pool]]) for pool in pools]


def describe_reuse(
    pools: Sequence[tuple[ExamplePool, ExamplePool]], pool_of: Sequence[int]
) -> list[str]:
    """Return a sentence for each pool whose examples were drawn more than once."""
    sentences = []
    for number, pair in enumerate(pools):
        clusters = [str(cluster) for cluster, pool in enumerate(pool_of) if pool == number]
        *first, last = clusters
        name = f"clusters {', '.join(first)} and {last}" if first else f"cluster {last}"
        for pool, part in zip(pair, ("training", "validation"), strict=True):
            if pool.drawn > len(pool.indices):
                sentences.append(
                    f"{name}: {len(pool.indices)} {part} examples were drawn"
                    f" {pool.drawn / len(pool.indices):.1f} times on average, reshuffled each time"
                )
    return sentences
