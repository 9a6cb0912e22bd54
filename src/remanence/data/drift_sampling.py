"""The examples of each client at each time step while the data drift.

`sample_examples` draws them from the pools of `example_pools.py`; `keep_partition` keeps those of a
partition and changes their view only. Both return ids, as `concept_views.py` defines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.concept_views import number_views
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit
from remanence.data.drift_schedules import changed_clients
from remanence.data.example_pools import (
    ExamplePool,
    SplitSizes,
    describe_reuse,
    find_pools,
    split_pools,
)

RESAMPLE = ("changed", "everyone")
_PoolSplit = tuple[np.ndarray, np.ndarray]  # training and validation examples of a pool


class DriftSamples(NamedTuple):
    """The examples of each client at each time step.

    Args:
        train: [T][K] arrays of ids, ascending.
        valid: the same for validation.
        reused: a sentence for each pool whose examples were drawn more than once.
    """

    train: list[list[np.ndarray]]
    valid: list[list[np.ndarray]]
    reused: list[str]


def sample_examples(
    assignment: np.ndarray,
    concepts: Sequence[Concept],
    split: DatasetSplit,
    indices: np.ndarray,
    samples: int,
    validation: float,
    resample: str,
    key: Key,
) -> DriftSamples:
    """Draw the examples of each client from the pool of its cluster.

    Args:
        assignment: [T, K] the cluster of each client at each time step.
        concepts: one for each cluster.
        split: the training split.
        indices: the examples of the split that clients may draw.
        samples: training examples of a client, times the `size_factor` of its concept; 0: as many
            as possible without drawing any example twice.
        validation: the same for validation examples; below 1: their fraction of what a client
            draws.
        resample: the clients that draw new examples at a time step: "changed", those whose cluster
            has changed, or "everyone".
        key: the draws are a function of it.
    """
    _check_options(samples, validation, resample)
    new = np.ones(assignment.shape, dtype=bool)
    if resample == "changed":
        new[1:] = changed_clients(assignment)[1:]
    # [clusters]: how often a client of the cluster draws, over all time steps
    draws = np.bincount(assignment[new], minlength=len(concepts))
    selected, pool_of = find_pools(concepts, split, indices)
    key = key.fold_in("pools")
    samples = samples or _max_samples(concepts, draws, split, selected, pool_of, validation, key)
    base = SplitSizes(samples, _validation_size(samples, validation))
    sizes = [_scale(concept, base) for concept in concepts]
    halves = split_pools(split, selected, base, key)
    _check_pools(sizes, draws, halves, pool_of)
    pools = [
        (
            ExamplePool(train, key.fold_in("pool", n, 0)),
            ExamplePool(valid, key.fold_in("pool", n, 1)),
        )
        for n, (train, valid) in enumerate(halves)
    ]
    nothing = [np.empty(0, np.int64)] * assignment.shape[1]
    ids: tuple[list[list[np.ndarray]], list[list[np.ndarray]]] = ([], [])
    view_of = number_views(concepts)
    for step, clusters in enumerate(assignment.tolist()):
        for part in ids:
            part.append(part[-1].copy() if step else nothing.copy())
        for client in np.flatnonzero(new[step]).tolist():
            cluster = clusters[client]
            offset = view_of[cluster] * len(split)
            for part, pool, size in zip(ids, pools[pool_of[cluster]], sizes[cluster], strict=True):
                part[step][client] = offset + pool.draw(size)
    return DriftSamples(*ids, describe_reuse(pools, pool_of))


def keep_partition(
    assignment: np.ndarray,
    concepts: Sequence[Concept],
    parts_train: Sequence[np.ndarray],
    parts_valid: Sequence[np.ndarray],
    split_size: int,
) -> DriftSamples:
    """Keep the examples that a partition gave each client; only their view changes.

    Args:
        assignment: [T, K] the cluster of each client at each time step.
        concepts: one for each cluster.
        parts_train: the training examples of each client.
        parts_valid: the validation examples of each client.
        split_size: the number of examples in the split.
    """
    for cluster, concept in enumerate(concepts):
        if concept.labels is not None or concept.domain is not None or concept.size_factor != 1:
            raise InputError(
                f"cluster {cluster} of the drift has labels, a domain or a number of"
                " examples of its own, so clients cannot keep their examples: "
                "set drift.source to pools, or let the drift swap, rotate or corrupt alone"
            )
    offsets = np.asarray(number_views(concepts))[assignment] * split_size  # [T, K]

    def ids(parts: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        return [
            [np.sort(part) + offset for part, offset in zip(parts, step, strict=True)]
            for step in offsets.tolist()
        ]

    return DriftSamples(ids(parts_train), ids(parts_valid), [])


def concept_test_ids(concepts: Sequence[Concept], test: DatasetSplit) -> list[np.ndarray]:
    """Return the test ids of each concept: all examples it selects, in its view."""
    return [
        view * len(test) + concept.select(test)
        for concept, view in zip(concepts, number_views(concepts), strict=True)
    ]


def _check_options(samples: int, validation: float, resample: str) -> None:
    if resample not in RESAMPLE:
        raise InputError(
            f"drift.resample cannot be {resample!r}: set it to one of {', '.join(RESAMPLE)}"
        )
    if samples < 0 or validation < 0:
        raise InputError(
            f"a client cannot draw {samples} samples and {validation} for validation: give"
            " drift.samples and drift.validation 0 or more"
        )


def _validation_size(samples: int, validation: float) -> int:
    """Return the number of validation examples for this number of training examples.

    >>> _validation_size(250, 75), _validation_size(90, 0.1), _validation_size(3, 0.1)
    (75, 10, 1)
    >>> _validation_size(3, 0)
    0
    """
    if validation >= 1 or not validation:
        return int(validation)
    return max(1, math.floor(samples * validation / (1 - validation) + 0.5))


def _scale(concept: Concept, base: SplitSizes) -> SplitSizes:
    """Multiply sizes by the size factor of a concept; at least 1 where they are not 0."""
    return SplitSizes(
        *(max(1, math.floor(concept.size_factor * size + 0.5)) if size else 0 for size in base)
    )


def _max_samples(
    concepts: Sequence[Concept],
    draws: np.ndarray,
    split: DatasetSplit,
    pools: Sequence[np.ndarray],
    pool_of: Sequence[int],
    validation: float,
    key: Key,
) -> int:
    """Return the most training examples a client can have when no example is drawn twice.

    D draws of S + V examples need a pool of D (S + V). Rounding changes each draw by up to one, so
    the search starts at an upper bound.
    """
    used = [cluster for cluster in range(len(concepts)) if draws[cluster]]
    sizes = np.array([len(pool) for pool in pools])
    count, weight = np.zeros(len(pools)), np.zeros(len(pools))
    for cluster in used:
        count[pool_of[cluster]] += draws[cluster]
        weight[pool_of[cluster]] += draws[cluster] * concepts[cluster].size_factor
    drawn = count > 0
    bound = math.floor(((sizes + count)[drawn] / weight[drawn]).min()) - int(validation)
    for samples in range(bound, 0, -1):
        base = SplitSizes(samples, _validation_size(samples, validation))
        needed = np.zeros((len(pools), 2), dtype=np.int64)
        for cluster in used:
            needed[pool_of[cluster]] += draws[cluster] * np.array(_scale(concepts[cluster], base))
        if (needed.sum(axis=1) <= sizes).all() and all(
            (need <= [len(train), len(valid)]).all()
            for need, (train, valid) in zip(
                needed, split_pools(split, pools, base, key), strict=True
            )
        ):
            return samples
    raise InputError(
        f"{int(draws.sum())} draws of 1 sample and {_validation_size(1, validation)} for"
        " validation do not fit into the data without reuse (there is room for"
        f" {math.floor((sizes[drawn] / weight[drawn]).min())} in each): set drift.samples, which"
        " allows reuse, or have fewer clients or time steps"
    )


def _check_pools(
    sizes: Sequence[SplitSizes],
    draws: np.ndarray,
    halves: Sequence[_PoolSplit],
    pool_of: Sequence[int],
) -> None:
    """Check that each pool holds what one client of each cluster needs."""
    for cluster, need in enumerate(sizes):
        train, valid = (len(half) for half in halves[pool_of[cluster]])
        if draws[cluster] and (need.train > train or need.valid > valid):
            raise InputError(
                f"a client of cluster {cluster} needs {need.train} training and"
                f" {need.valid} validation examples, but the cluster has {train} "
                f"and {valid}: lower drift.samples or drift.validation, or give the"
                " cluster more labels or a larger domain"
            )
