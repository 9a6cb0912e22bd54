"""What every reader returns: a `ArrayDataset`, two splits of examples with labels and, where there
are any, groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.splits import draw_stratified

INPUT_KINDS = {"image": 4, "table": 2, "tokens": 2}  # kind: axes of x
# fixed: the test set is the same for every seed of an experiment
TEST_KEY = Key(0).fold_in("held-out test set")
_VALUES_AT_ONCE = 1 << 21
_Refuse = Callable[[str, str], InputError]


@dataclass(frozen=True, eq=False)
class DatasetSplit:
    """Examples that belong together, with one label each."""

    x: np.ndarray  # image: uint8 [n, c, h, w]; table: float32 [n, f]; tokens: int64 [n, length]
    y: np.ndarray  # int64 [n]
    # int64 [n]: which writer, user or domain an example comes from
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def select(self, rows: np.ndarray) -> DatasetSplit:
        """The split that holds only these rows."""
        return DatasetSplit(
            self.x[rows], self.y[rows], None if self.groups is None else self.groups[rows]
        )


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A data set in memory."""

    name: str
    kind: str  # image | table | tokens
    classes: tuple[str, ...]
    train: DatasetSplit
    test: DatasetSplit
    group_names: tuple[str, ...] = ()
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[1:])

    def statistics(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and standard deviation of the training examples in raw units: per channel [c], per
        feature [f], or None for tokens.

        A channel or feature that never changes has standard deviation 1, so that one may always
        divide by it.
        """
        if self.kind == "tokens":
            return None
        axes = (0, 2, 3) if self.kind == "image" else (0,)
        count = len(self.train) * (math.prod(self.shape[1:]) if self.kind == "image" else 1)
        mean = (
            sum(chunk.sum(axis=axes, dtype=np.float64) for chunk in _chunks(self.train.x)) / count
        )
        center = np.expand_dims(mean, axes)
        # around the mean, in a second pass: the textbook sum of squares loses all digits where the
        # mean is large
        variance = (
            sum(
                np.square(chunk - center, dtype=np.float64).sum(axis=axes)
                for chunk in _chunks(self.train.x)
            )
            / count
        )
        std = np.sqrt(variance)
        return mean, np.where(std > 0, std, 1.0)


def _chunks(x: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _VALUES_AT_ONCE // max(1, math.prod(x.shape[1:])))
    return (x[start : start + step] for start in range(0, len(x), step))


def validate(source: ArrayDataset) -> ArrayDataset:
    """The source itself, or one sentence on what is wrong with it."""

    def refuse(what: str, cure: str) -> InputError:
        return InputError(f"source {source.name!r} {what}: {cure}")

    if source.kind not in INPUT_KINDS:
        raise refuse(f"has the kind {source.kind!r}", f"a kind is one of {', '.join(INPUT_KINDS)}")
    if len(source.classes) < 2:
        raise refuse(
            f"has {len(source.classes)} class",
            "a classifier needs two classes or more, so check the labels",
        )
    for part, split in (("training", source.train), ("test", source.test)):
        _check_split(source, part, split, refuse)
    if source.train.x.shape[1:] != source.test.x.shape[1:]:
        raise refuse(
            f"has training examples of shape {source.shape} and test examples of shape"
            f" {tuple(source.test.x.shape[1:])}",
            "make them alike",
        )
    return source


def _check_split(source: ArrayDataset, part: str, split: DatasetSplit, refuse: _Refuse) -> None:
    if split.y.ndim != 1 or split.y.dtype != np.int64:
        raise refuse(
            f"has {part} labels of type {split.y.dtype} and shape {split.y.shape}",
            "labels are one int64 number for each example",
        )
    if not len(split.y):
        raise refuse(
            f"has no {part} examples",
            "every source needs at least one of them, so give more data or another test fraction",
        )
    if len(split.x) != len(split.y):
        raise refuse(
            f"has {len(split.x)} {part} examples but {len(split.y)} labels",
            "give one label for each example",
        )
    dtype = {"image": np.uint8, "table": np.float32, "tokens": np.int64}[source.kind]
    if split.x.ndim != INPUT_KINDS[source.kind] or split.x.dtype != dtype or 0 in split.x.shape:
        shape = {
            "image": "[n, channels, height, width]",
            "table": "[n, features]",
            "tokens": "[n, length]",
        }[source.kind]
        raise refuse(
            f"has {part} examples of type {split.x.dtype} and shape {split.x.shape}",
            f"the kind {source.kind!r} is {np.dtype(dtype)} {shape}",
        )
    low, high = int(split.y.min()), int(split.y.max())
    if low < 0 or high >= len(source.classes):
        raise refuse(
            f"has {part} labels from {low} to {high}",
            f"its {len(source.classes)} classes are numbered 0 to {len(source.classes) - 1}",
        )
    if source.kind == "table" and not all(np.isfinite(chunk).all() for chunk in _chunks(split.x)):
        raise refuse(
            f"has {part} examples that hold NaN or infinity",
            "remove these rows or fill in the missing values",
        )
    if source.kind == "tokens" and split.x.min() < 0:
        raise refuse(
            f"has a negative token among the {part} examples", "tokens are numbered from 0"
        )
    _check_groups(source, part, split, refuse)


def _check_groups(source: ArrayDataset, part: str, split: DatasetSplit, refuse: _Refuse) -> None:
    if split.groups is None:
        return
    if split.groups.shape != split.y.shape or split.groups.dtype != np.int64:
        raise refuse(
            f"has {part} groups of type {split.groups.dtype} and shape {split.groups.shape}",
            "groups are one int64 number for each example",
        )
    low, high = int(split.groups.min()), int(split.groups.max())
    if low < 0 or high >= len(source.group_names):
        raise refuse(
            f"has {part} groups from {low} to {high} and {len(source.group_names)} group names",
            "groups are numbered from 0 and each has a name",
        )


def check_fraction(test: float) -> None:
    """Refuse a test fraction that cannot be, before anything is read."""
    if not 0 < test < 1:
        raise InputError(
            f"a test fraction of {test} leaves no training or no test examples: give a number"
            " between 0 and 1, such as 0.2"
        )


def hold_out_test(
    split: DatasetSplit, fraction: float, key: Key = TEST_KEY
) -> tuple[DatasetSplit, DatasetSplit]:
    """(train, test) for data that come without a test set: stratified by class, and by group where
    there are groups.

    Never fold the experiment's seed into `key`: runs with different seeds must be tested on the
    same examples.
    """
    check_fraction(fraction)
    if len(split) < 2:
        raise InputError(
            f"a test set cannot be held out from {len(split)} example: give at least two"
        )
    strata = split.y if split.groups is None else split.groups * (split.y.max() + 1) + split.y
    held = np.zeros(len(split), dtype=bool)
    held[
        draw_stratified(strata, min(len(split) - 1, max(1, round(fraction * len(split)))), key)
    ] = True
    # a class that is only tested cannot be learned
    for label in np.setdiff1d(split.y[held], split.y[~held]):
        held[np.flatnonzero(split.y == label)[0]] = False
    if not held.any():
        raise InputError(
            "a test set cannot be held out because every class has a single example: give a"
            " test set of its own"
        )
    return split.select(np.flatnonzero(~held)), split.select(np.flatnonzero(held))
