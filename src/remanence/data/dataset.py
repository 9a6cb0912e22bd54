"""`ArrayDataset`: a training and a test split in memory. Every reader returns one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.splits import draw_stratified

# kind: axes of x
INPUT_KINDS = {"image": 4, "table": 2, "tokens": 2, "sequence": 3, "volume": 5}
# kind: types of x, that of integers first
INPUT_TYPES = {
    "image": (np.uint8, np.float32),
    "table": (np.float32,),
    "tokens": (np.int64,),
    "sequence": (np.float32,),
    "volume": (np.uint8, np.float32),
}
INPUT_SHAPES = {
    "image": "[n, channels, height, width]",
    "table": "[n, features]",
    "tokens": "[n, length]",
    "sequence": "[n, steps, features]",
    "volume": "[n, channels, depth, height, width]",
}
# fixed: the test set is the same for every seed of an experiment
TEST_KEY = Key(0).fold_in("held-out test set")
CHUNK_VALUES = 1 << 21
# bytes of an example besides its inputs: its label and id, and the orders by which held-out sets
# and partitions are drawn
LABEL_BYTES = 128
CLASS_BYTES = 128  # of a short class name as a Python string, and its place in a tuple
_MakeError = Callable[[str, str], InputError]


@dataclass(frozen=True, eq=False)
class DatasetSplit:
    """Examples with one label each, and optionally the group each example comes from."""

    x: np.ndarray  # of a type of `INPUT_TYPES` and a shape of `INPUT_SHAPES`
    y: np.ndarray  # int64 [n]
    # int64 [n]: the writer, user or domain of each example
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def select(self, indices: np.ndarray) -> DatasetSplit:
        """Return a split with only these examples."""
        groups = None if self.groups is None else self.groups[indices]
        return DatasetSplit(self.x[indices], self.y[indices], groups)


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A dataset in memory.

    Args:
        name: how messages and reports call it.
        kind: "image", "table", "tokens", "sequence" or "volume"; see `INPUT_SHAPES`.
        classes: the class names; labels are positions in it.
        train: the training split.
        test: the test split.
        group_names: the writers, users or domains that `DatasetSplit.groups` refers to.
        note: one sentence on the dataset, for reports.
        by_site: the groups are sites: each is a client, unless the settings name a partition.
    """

    name: str
    kind: str
    classes: tuple[str, ...]
    train: DatasetSplit
    test: DatasetSplit
    group_names: tuple[str, ...] = ()
    note: str = ""
    by_site: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[1:])

    def statistics(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the mean and the standard deviation of the training examples, in raw units.

        Returns:
            Per channel [c], per feature [f], or None for tokens. A constant channel or feature has
            standard deviation 1, so that division by it is always defined.
        """
        if self.kind == "tokens":
            return None
        kept = statistics_shape(self.shape).index(-1)
        axes = (0, *(axis + 1 for axis in range(len(self.shape)) if axis != kept))
        count = self.train.x.size // self.shape[kept]
        mean = (
            sum(chunk.sum(axis=axes, dtype=np.float64) for chunk in _chunks(self.train.x)) / count
        )
        center = np.expand_dims(mean, axes)
        # two passes: E[x^2] - E[x]^2 loses all digits where the mean is large
        variance = (
            sum(
                np.square(chunk - center, dtype=np.float64).sum(axis=axes)
                for chunk in _chunks(self.train.x)
            )
            / count
        )
        std = np.sqrt(variance)
        return mean, np.where(std > 0, std, 1.0)

    def input_range(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the middle of the smallest and the largest training input and half their
        distance, in raw units, in the form of `statistics`: inputs minus the first, divided by the
        second, lie between -1 and 1.
        """
        if self.kind == "tokens":
            return None
        lowest, highest = float(self.train.x.min()), float(self.train.x.max())
        channels = np.ones(self.shape[0])
        return channels * (lowest + highest) / 2, channels * ((highest - lowest) / 2 or 1.0)


def statistics_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which one number for each channel or feature broadcasts over an example: the
    features of a sequence are its last axis, channels are the first.

    >>> statistics_shape((3, 32, 32)), statistics_shape((50, 6)), statistics_shape((6,))
    ((-1, 1, 1), (1, -1), (-1,))
    """
    return (1, -1) if len(shape) == 2 else (-1, *(1,) * (len(shape) - 1))


def _chunks(x: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, CHUNK_VALUES // max(1, math.prod(x.shape[1:])))
    return (x[start : start + step] for start in range(0, len(x), step))


def validate(dataset: ArrayDataset) -> ArrayDataset:
    """Check shapes, types, labels and groups of a dataset.

    Returns:
        The dataset itself.

    Raises:
        InputError: something is wrong; the message names it and the way to correct it.
    """

    def error(what: str, cure: str) -> InputError:
        return InputError(f"dataset {dataset.name!r} {what}: {cure}")

    if dataset.kind not in INPUT_KINDS:
        raise error(f"has the kind {dataset.kind!r}", f"a kind is one of {', '.join(INPUT_KINDS)}")
    if len(dataset.classes) < 2:
        raise error(
            f"has {len(dataset.classes)} class",
            "a classifier needs two classes or more, so check the labels",
        )
    for part, split in (("training", dataset.train), ("test", dataset.test)):
        _check_split(dataset, part, split, error)
    types = dataset.train.x.dtype, dataset.test.x.dtype
    if types[0] != types[1]:
        raise error(
            f"has training examples of type {types[0]} and test examples of type {types[1]}",
            "give both the same type, since whole numbers and floats have different scales",
        )
    if dataset.train.x.shape[1:] != dataset.test.x.shape[1:]:
        raise error(
            f"has training examples of shape {dataset.shape} and test examples of shape"
            f" {tuple(dataset.test.x.shape[1:])}",
            "give both the same shape",
        )
    return dataset


def _check_split(dataset: ArrayDataset, part: str, split: DatasetSplit, error: _MakeError) -> None:
    if split.y.ndim != 1 or split.y.dtype != np.int64:
        raise error(
            f"has {part} labels of type {split.y.dtype} and shape {split.y.shape}",
            "labels are one int64 number for each example",
        )
    if not len(split.y):
        raise error(
            f"has no {part} examples",
            "every dataset needs at least one of them, so give more data or another test fraction",
        )
    if len(split.x) != len(split.y):
        raise error(
            f"has {len(split.x)} {part} examples but {len(split.y)} labels",
            "give one label for each example",
        )
    types = INPUT_TYPES[dataset.kind]
    if split.x.ndim != INPUT_KINDS[dataset.kind] or split.x.dtype not in types or not split.x.size:
        raise error(
            f"has {part} examples of type {split.x.dtype} and shape {split.x.shape}",
            f"the kind {dataset.kind!r} is {' or '.join(str(np.dtype(t)) for t in types)}"
            f" {INPUT_SHAPES[dataset.kind]}",
        )
    low, high = int(split.y.min()), int(split.y.max())
    if low < 0 or high >= len(dataset.classes):
        raise error(
            f"has {part} labels from {low} to {high}",
            f"its {len(dataset.classes)} classes are numbered 0 to {len(dataset.classes) - 1}",
        )
    problem = describe_not_finite(split.x)
    if problem:
        raise error(
            f"has {part} examples that hold NaN or infinity ({problem})",
            "remove these rows or fill in the missing values",
        )
    if dataset.kind == "tokens" and split.x.min() < 0:
        raise error(f"has a negative token among the {part} examples", "tokens are numbered from 0")
    _check_groups(dataset, part, split, error)


def describe_not_finite(x: np.ndarray) -> str:
    """How many examples hold NaN or infinity, and the first of them; empty where none does."""
    if x.dtype.kind != "f" or not x.size:
        return ""
    axes = tuple(range(1, x.ndim))
    bad = np.concatenate([~np.isfinite(chunk).all(axis=axes) for chunk in _chunks(x)])
    if not bad.any():
        return ""
    return f"{int(bad.sum())} of {len(x)}, the first is number {int(bad.argmax())}"


def _check_groups(dataset: ArrayDataset, part: str, split: DatasetSplit, error: _MakeError) -> None:
    if split.groups is None:
        return
    if split.groups.shape != split.y.shape or split.groups.dtype != np.int64:
        raise error(
            f"has {part} groups of type {split.groups.dtype} and shape {split.groups.shape}",
            "groups are one int64 number for each example",
        )
    low, high = int(split.groups.min()), int(split.groups.max())
    if low < 0 or high >= len(dataset.group_names):
        raise error(
            f"has {part} groups from {low} to {high} and {len(dataset.group_names)} group names",
            "groups are numbered from 0 and each has a name",
        )


def dataset_bytes(examples: int, inputs: int) -> dict[str, int]:
    """Return what a dataset takes, for `check_memory`.

    Args:
        examples: training and test examples together.
        inputs: bytes of their inputs, with all copies that are in memory at the peak.
    """
    return {
        "the examples": inputs,
        "the labels and the order of the examples": examples * LABEL_BYTES,
    }


def check_fraction(test: float) -> None:
    """Raise an `InputError` unless 0 < test < 1; called before any file is read."""
    if not 0 < test < 1:
        raise InputError(
            f"a test fraction of {test} leaves no training or no test examples: give a number"
            " between 0 and 1, such as 0.2"
        )


def limit_examples(dataset: ArrayDataset, train: int, test: int) -> ArrayDataset:
    """Keep at most so many training and test examples, drawn in proportion to classes and sites,
    the same for every seed of an experiment. 0 keeps all.
    """
    limited = []
    for split, most, name in ((dataset.train, train, "training"), (dataset.test, test, "test")):
        if 0 < most < len(split):
            kept = draw_stratified(_strata(split), most, TEST_KEY.fold_in(f"limit {name}"))
            split = split.select(np.sort(kept))
        limited.append(split)
    if limited == [dataset.train, dataset.test]:
        return dataset
    return replace(dataset, train=limited[0], test=limited[1])


def _strata(split: DatasetSplit) -> np.ndarray:
    """A number for each class of each group."""
    return split.y if split.groups is None else split.groups * (split.y.max() + 1) + split.y


def hold_out_test(
    split: DatasetSplit, fraction: float, key: Key = TEST_KEY
) -> tuple[DatasetSplit, DatasetSplit]:
    """Hold out a test set for data that come without one, stratified by class and group.

    Args:
        split: all examples.
        fraction: the share of the test set.
        key: never fold the seed of an experiment into it: runs with different seeds must be tested
            on the same examples.

    Returns:
        (train, test). Every class has at least one training example.
    """
    check_fraction(fraction)
    if len(split) < 2:
        raise InputError(
            f"a test set cannot be held out from {len(split)} example: give at least two"
        )
    strata = _strata(split)
    count = min(len(split) - 1, max(1, round(fraction * len(split))))
    held = np.zeros(len(split), dtype=bool)
    held[draw_stratified(strata, count, key)] = True
    # a class without training examples cannot be learned
    for label in np.setdiff1d(split.y[held], split.y[~held]):
        held[np.flatnonzero(split.y == label)[0]] = False
    if not held.any():  # every example that was drawn is the only one of its class
        _, member, sizes = np.unique(split.y, return_inverse=True, return_counts=True)
        if sizes.max() == 1:
            raise InputError(
                "a test set cannot be held out because every class has a single example: give a"
                " test set of its own"
            )
        held[np.argmax(sizes[member])] = True  # the first example of the largest class
    return split.select(np.flatnonzero(~held)), split.select(np.flatnonzero(held))
