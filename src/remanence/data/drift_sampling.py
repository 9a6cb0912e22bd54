"""Drawing rows while the data drift: which examples each client holds at each time step.

Rows are split once into those for training and those for validation, by row and for all concepts
together, so that nothing that anybody validates on is ever trained on by anyone, in any view,
however often the rest is reshuffled. Concepts that select the same rows draw from one pool. A pool
deals its rows out without repeating any until it is empty; then it is shuffled and dealt again. Ids
are explained in `concept_views.py`.
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
from remanence.data.splits import draw_stratified

RESAMPLE = ("changed", "everyone")


class DriftSamples(NamedTuple):
    """What each client holds at each time step: ids, ascending."""

    train: list[list[np.ndarray]]  # [T][K]
    valid: list[list[np.ndarray]]  # [T][K]
    reused: list[str]  # a sentence for each pool that was dealt out more than once


class _Sizes(NamedTuple):
    """How many rows a client of a concept gets."""

    train: int
    valid: int


class _Pool:
    """Rows that are dealt out one after the other, and shuffled anew when none are left."""

    def __init__(self, rows: np.ndarray, key: Key):
        self.rows, self.key = rows, key
        self.order, self.passes, self.dealt = rows[:0], 0, 0

    def next_rows(self, count: int) -> np.ndarray:
        """`count` different rows, in ascending order; the pool must hold that many."""
        taken, self.order = self.order[:count], self.order[count:]
        if len(taken) < count:
            order = self.rows[self.key.fold_in(self.passes).permutation(len(self.rows))]
            again = np.isin(order, taken)
            # what this client has just got comes last
            order = np.concatenate([order[~again], order[again]])
            missing = count - len(taken)
            taken, self.order, self.passes = (
                np.concatenate([taken, order[:missing]]),
                order[missing:],
                self.passes + 1,
            )
        self.dealt += count
        return np.sort(taken)


def sample_rows(
    assignment: np.ndarray,
    concepts: Sequence[Concept],
    split: DatasetSplit,
    rows: np.ndarray,
    samples: int,
    validation: float,
    renew: str,
    key: Key,
) -> DriftSamples:
    """Deal `rows` of a split out to clients by the cluster they are in. assignment: [T, K]

    A client gets `samples` training rows and `validation` validation rows, times the share of its
    concept; with `samples` 0, as many as there can be without any row being used twice. A
    `validation` below 1 is a fraction of all the rows a client draws. `renew` says who gets new
    rows at a time step: "changed", whose cluster has changed, or "everyone".
    """
    if renew not in RESAMPLE:
        raise InputError(
            f"data cannot be renewed for {renew!r}: set drift.resample to one of {', '.join(RESAMPLE)}"
        )
    if samples < 0 or validation < 0:
        raise InputError(
            f"a client cannot draw {samples} samples and {validation} for validation: give"
            " drift.samples and drift.validation 0 or more"
        )
    fresh = (
        changed_clients(assignment) if renew == "changed" else np.ones(assignment.shape, dtype=bool)
    )
    fresh[0] = True
    # [M], how many clients are dealt to, over all time steps
    draws = np.bincount(assignment[fresh], minlength=len(concepts))
    pools, pool_of = _find_pools(concepts, split, rows)
    key = key.fold_in("pools")
    samples = samples or _find_size(concepts, draws, split, pools, pool_of, validation, key)
    whole = _Sizes(samples, _count_validation(samples, validation))
    needs = [_scale(concept, whole) for concept in concepts]
    sides = _split_rows(split, pools, whole, key)
    _check_pools(needs, draws, sides, pool_of)
    piles = [
        tuple(_Pool(side, key.fold_in("pool", pool, place)) for place, side in enumerate(pair))
        for pool, pair in enumerate(sides)
    ]
    train: list[list[np.ndarray]] = []
    valid: list[list[np.ndarray]] = []
    view_of = number_views(concepts)
    for step, clusters in enumerate(assignment.tolist()):
        train.append(train[-1].copy() if step else [np.empty(0, np.int64)] * len(clusters))
        valid.append(valid[-1].copy() if step else [np.empty(0, np.int64)] * len(clusters))
        for client in np.flatnonzero(fresh[step]).tolist():
            cluster = clusters[client]
            start = view_of[cluster] * len(split)
            for held, pile, count in zip(
                (train, valid), piles[pool_of[cluster]], needs[cluster], strict=True
            ):
                held[step][client] = start + pile.next_rows(count)
    return DriftSamples(train, valid, _describe_reuse(piles, pool_of))


def keep_partition(
    assignment: np.ndarray,
    concepts: Sequence[Concept],
    parts_train: Sequence[np.ndarray],
    parts_valid: Sequence[np.ndarray],
    rows: int,
) -> DriftSamples:
    """Clients keep the rows that a partition gave them, and only the view changes with their
    cluster. `rows` is the number in the split.
    """
    for cluster, concept in enumerate(concepts):
        if concept.labels is not None or concept.domain is not None or concept.size_factor != 1:
            raise InputError(
                f"cluster {cluster} of the drift has labels, a domain or a number of"
                " examples of its own, so clients cannot keep their rows: "
                "set drift.rows to pools, or let the drift swap, rotate or corrupt alone"
            )
    start = np.asarray(number_views(concepts))[assignment] * rows  # [T, K]

    def show(parts: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        return [
            [np.sort(part) + first for part, first in zip(parts, firsts, strict=True)]
            for firsts in start.tolist()
        ]

    return DriftSamples(show(parts_train), show(parts_valid), [])


def test_rows(concepts: Sequence[Concept], test: DatasetSplit) -> list[np.ndarray]:
    """The test ids of each concept: all rows with its labels and domain, in its view."""
    return [
        view * len(test) + concept.select(test)
        for concept, view in zip(concepts, number_views(concepts), strict=True)
    ]


def _find_pools(
    concepts: Sequence[Concept], split: DatasetSplit, rows: np.ndarray
) -> tuple[list[np.ndarray], list[int]]:
    """The distinct sets of rows that concepts select, and which one is whose."""
    pools: list[np.ndarray] = []
    numbers: dict[tuple[object, object], int] = {}
    for concept in concepts:
        if (concept.labels, concept.domain) not in numbers:
            selected = np.intersect1d(concept.select(split), rows)
            same = [number for number, pool in enumerate(pools) if np.array_equal(pool, selected)]
            numbers[concept.labels, concept.domain] = same[0] if same else len(pools)
            pools += [] if same else [selected]
    return pools, [numbers[concept.labels, concept.domain] for concept in concepts]


def _split_rows(
    split: DatasetSplit, pools: Sequence[np.ndarray], whole: _Sizes, key: Key
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The training and the validation rows of each pool: one split by row, stratified by label,
    and by group where there are groups.
    """
    rows = np.unique(np.concatenate(pools))
    labels, held = split.y[rows], np.zeros(len(split), dtype=bool)
    # where rows have many owners but no pool is one owner's, strata by owner would be a row or two
    # each: only pools need even shares
    member = np.zeros(len(rows), dtype=np.int64)
    for pool in pools:
        member = np.unique(2 * member + np.isin(rows, pool), return_inverse=True)[1]
    if whole.valid and len(rows):
        count = min(
            len(rows) - 1,
            max(1, math.floor(len(rows) * whole.valid / (whole.train + whole.valid) + 0.5)),
        )
        held[
            rows[
                draw_stratified(
                    member * (int(labels.max()) + 1) + labels, count, key.fold_in("validation")
                )
            ]
        ] = True
    return [(pool[~held[pool]], pool[held[pool]]) for pool in pools]


def _count_validation(samples: int, validation: float) -> int:
    """Validation rows beside so many training rows.

    >>> _count_validation(250, 75), _count_validation(90, 0.1), _count_validation(3, 0.1), _count_validation(3, 0)
    (75, 10, 1, 0)
    """
    if validation >= 1 or not validation:
        return int(validation)
    return max(1, math.floor(samples * validation / (1 - validation) + 0.5))


def _scale(concept: Concept, whole: _Sizes) -> _Sizes:
    """What is left of the whole number for a client with its concept's share of it: something
    of everything.
    """
    return _Sizes(
        *(max(1, math.floor(concept.size_factor * count + 0.5)) if count else 0 for count in whole)
    )


def _find_size(
    concepts: Sequence[Concept],
    draws: np.ndarray,
    split: DatasetSplit,
    pools: Sequence[np.ndarray],
    pool_of: Sequence[int],
    validation: float,
    key: Key,
) -> int:
    """The most training rows a client can have when no pool may be dealt out twice.

    D draws of S + V rows need a pool of D (S + V). Rounding may save each draw up to a row or cost
    it one, so this gives a guess from above.
    """
    visited = [cluster for cluster in range(len(concepts)) if draws[cluster]]
    sizes, count, weight = (
        np.array([len(pool) for pool in pools]),
        np.zeros(len(pools)),
        np.zeros(len(pools)),
    )
    for cluster in visited:
        count[pool_of[cluster]] += draws[cluster]
        weight[pool_of[cluster]] += draws[cluster] * concepts[cluster].size_factor
    some = count > 0
    guess = math.floor(((sizes + count)[some] / weight[some]).min()) - int(validation)
    for samples in range(guess, 0, -1):
        whole = _Sizes(samples, _count_validation(samples, validation))
        needed = np.zeros((len(pools), 2), dtype=np.int64)
        for cluster in visited:
            needed[pool_of[cluster]] += draws[cluster] * np.array(_scale(concepts[cluster], whole))
        if (needed.sum(axis=1) > sizes).any():
            continue
        sides = _split_rows(split, pools, whole, key)
        if all(
            (needed[pool] <= [len(side) for side in pair]).all() for pool, pair in enumerate(sides)
        ):
            return samples
    room = math.floor((sizes[some] / weight[some]).min())
    raise InputError(
        f"{int(draws.sum())} draws of 1 sample and {_count_validation(1, validation)} for"
        " validation do not fit into the data without reuse "
        f"(there is room for {room} in each): set drift.samples, which allows reuse, or"
        " have fewer clients or time steps"
    )


def _check_pools(
    needs: Sequence[_Sizes],
    draws: np.ndarray,
    sides: Sequence[tuple[np.ndarray, np.ndarray]],
    pool_of: Sequence[int],
) -> None:
    for cluster, need in enumerate(needs):
        train, valid = (len(side) for side in sides[pool_of[cluster]])
        if draws[cluster] and (need.train > train or need.valid > valid):
            raise InputError(
                f"a client of cluster {cluster} needs {need.train} training and"
                f" {need.valid} validation examples, but the cluster has {train} "
                f"and {valid}: lower drift.samples or drift.validation, or give the"
                " cluster more labels or a larger domain"
            )


def _describe_reuse(piles: Sequence[tuple[_Pool, ...]], pool_of: Sequence[int]) -> list[str]:
    sentences = []
    for number, pair in enumerate(piles):
        clusters = [str(cluster) for cluster, pool in enumerate(pool_of) if pool == number]
        whose = (
            f"cluster {clusters[0]}"
            if len(clusters) == 1
            else f"clusters {', '.join(clusters[:-1])} and {clusters[-1]}"
        )
        for pile, part in zip(pair, ("training", "validation"), strict=True):
            if pile.dealt > len(pile.rows):
                sentences.append(
                    f"{whose}: {len(pile.rows)} {part} examples were dealt out"
                    f" {pile.dealt / len(pile.rows):.1f} times over, reshuffled each time"
                )
    return sentences
