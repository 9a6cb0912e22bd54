"""Arrays of users as an `ArrayDataset`: what kind they are, which type they are stored in, and the
numbers of their labels and sites. All readers of own data end in `assemble`.

Whole numbers stay what they are. Floats are kept as float32, except for images that are bytes
divided by 255, as torchvision's ToTensor makes them: those are stored as the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remanence.core.errors import InputError
from remanence.data.dataset import (
    INPUT_KINDS,
    ArrayDataset,
    DatasetSplit,
    describe_not_finite,
    hold_out_test,
    validate,
)

CHANNELS = (1, 3, 4)
MAX_CLASSES = 100_000
EXACT = 1 << 24  # float32 holds all whole numbers up to this one


class LabeledArrays(NamedTuple):
    """Examples as a user has them."""

    x: np.ndarray
    y: np.ndarray  # whole numbers or texts
    sites: np.ndarray | None = None  # the name or number of the site of each example
    name: str = "x"  # of x, in errors


def assemble(
    what: str,
    parts: Sequence[LabeledArrays],
    *,
    kind: str = "",
    classes: Sequence[str] | None = None,
    test: float = 0.2,
    by_site: bool = False,
    note: str = "",
    name: str = "",
) -> ArrayDataset:
    """Make a dataset.

    Args:
        what: Names the data in errors.
        parts: Training examples, or training and test examples.
        kind: A key of `INPUT_KINDS`. Default: by shape and type, see `guess_kind`.
        classes: The class names. Default: the labels themselves.
        test: The fraction of test examples that is held out where there are none.
        by_site: Whether each site is a client unless the settings say otherwise.
        note: One sentence for reports.
        name: Of the dataset, for reports. Default: `what`.
    """
    check_kind(kind, what)
    if len({part.x.dtype.kind in "biu" for part in parts}) > 1:
        types = " and ".join(f"{part.name} of {part.x.dtype}" for part in parts)
        raise InputError(
            f"{what!r} has {types}: give both the same type, since whole numbers and floats have"
            " different scales"
        )
    kind = kind or guess_kind(parts[0].x)
    inputs = convert_inputs(parts, kind, what)
    names, labels = number_labels([part.y for part in parts], classes, what)
    sites, groups = number_sites([part.sites for part in parts])
    for part, y in zip(parts, labels, strict=True):
        _check_lengths(part, y, what)
    splits = [DatasetSplit(*columns) for columns in zip(inputs, labels, groups, strict=True)]
    if len(splits) == 1:
        splits = list(hold_out_test(splits[0], test))
    made = ArrayDataset(
        name or what, kind, names, splits[0], splits[1], sites, note, by_site=by_site
    )
    return validate(made)


def check_kind(kind: str, what: str) -> None:
    """Raise an `InputError` for an unknown kind; called before any file is read."""
    if kind and kind not in INPUT_KINDS:
        raise InputError(
            f"dataset {what!r} has no kind {kind!r}: choose one of {', '.join(INPUT_KINDS)} or"
            " leave it out"
        )


def _check_lengths(part: LabeledArrays, y: np.ndarray, what: str) -> None:
    lengths = {len(part.x), len(y)} | (set() if part.sites is None else {len(part.sites)})
    if len(lengths) > 1:
        raise InputError(
            f"{what!r} has {len(part.x)} examples in {part.name} but {len(y)} labels"
            f"{'' if part.sites is None else f' and {len(part.sites)} groups'}: give as many of"
            " each"
        )


def guess_kind(x: np.ndarray) -> str:
    """The kind of inputs by their shape and type; `kind=` says otherwise.

    Two axes are a table, or tokens if they are whole numbers wider than a byte; three axes are gray
    images, or sequences if they are floats; four are images, five are volumes.
    """
    return guess_kind_of(x.ndim, x.dtype)


def guess_kind_of(axes: int, dtype: np.dtype) -> str:
    """The same, before an array is read."""
    if axes == 2:
        return "tokens" if dtype.kind in "iu" and dtype.itemsize > 1 else "table"
    if axes == 3 and dtype.kind == "f":
        return "sequence"
    return "volume" if axes == 5 else "image"


def convert_inputs(parts: Sequence[LabeledArrays], kind: str, what: str) -> list[np.ndarray]:
    """The inputs of all parts in the axes and the type of the kind, the same type for all."""
    arrays = [_with_axes(part, kind, f"{what} {part.name}") for part in parts]
    if kind == "tokens":
        return [x.astype(np.int64, copy=False) for x in arrays]
    if kind in ("image", "volume"):
        if all(_are_bytes(x) for x in arrays):
            return [np.ascontiguousarray(x, dtype=np.uint8) for x in arrays]
        if all(x.dtype.kind == "f" and _are_fractions_of_bytes(x) for x in arrays):
            scaled = (np.rint(x * x.dtype.type(255)) for x in arrays)
            return [np.ascontiguousarray(x, dtype=np.uint8) for x in scaled]
    return [_as_float32(x, f"{what} {part.name}") for x, part in zip(arrays, parts, strict=True)]


def _with_axes(part: LabeledArrays, kind: str, where: str) -> np.ndarray:
    """The inputs with the axes of the kind: gray images get a channel, channels come first."""
    x = part.x
    if x.dtype.kind not in ("biu" if kind == "tokens" else "biuf"):
        raise InputError(
            f"{where!r} has examples of type {x.dtype}: give"
            f" {'whole ' if kind == 'tokens' else ''}numbers for the kind {kind!r}"
        )
    if kind in ("image", "volume") and x.ndim == INPUT_KINDS[kind] - 1:
        x = x[:, None]
    if x.ndim != INPUT_KINDS[kind]:
        cure = {
            "image": "[height, width], [channels, height, width] or [height, width, channels]",
            "volume": "[depth, height, width] or [channels, depth, height, width]",
            "sequence": "[steps, features]",
        }.get(kind, f"one axis, or another kind than {kind!r}")
        raise InputError(f"{where!r} has {kind} examples of shape {x.shape[1:]}: give {cure}")
    return channels_first(x) if kind == "image" else x


def _are_bytes(x: np.ndarray) -> bool:
    if x.dtype.kind not in "biu":
        return False
    return (x.dtype.itemsize == 1 and x.dtype.kind in "bu") or (x.min() >= 0 and x.max() <= 255)


def _are_fractions_of_bytes(x: np.ndarray) -> bool:
    """Whether floats are bytes divided by 255, exactly."""
    for part in (x[:1], x):  # most that are not show it in the first example
        scaled = np.rint(part * part.dtype.type(255))
        if not np.array_equal(scaled / part.dtype.type(255), part) or (
            part.size and (part.min() < 0 or part.max() > 1)
        ):
            return False
    return True


def _as_float32(x: np.ndarray, where: str) -> np.ndarray:
    """float32, with an error where values would be lost."""
    if x.dtype.kind in "iu" and x.size and max(abs(int(x.min())), abs(int(x.max()))) > EXACT:
        raise InputError(
            f"{where!r} has whole numbers from {x.min()} to {x.max()}, which float32 does not hold"
            f" exactly: scale them to at most {EXACT}"
        )
    with np.errstate(over="ignore"):  # values beyond float32 become infinity
        converted = np.ascontiguousarray(x, dtype=np.float32)
    problem = describe_not_finite(converted)
    if problem:
        raise InputError(
            f"{where!r} has examples that hold NaN or infinity ({problem}): remove these rows or"
            " fill in the missing values"
        )
    return converted


def number_labels(
    labels: Sequence[np.ndarray], classes: Sequence[str] | None, what: str
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Class names, and the labels as numbers. Texts become the names of their classes, in the order
    of `classes` or sorted; whole numbers stay what they are.
    """
    columns = [_label_column(y, what) for y in labels]
    if all(y.dtype.kind in "iu" for y in columns):
        numbers = [y.astype(np.int64) for y in columns]
        return class_names(numbers, classes, what), numbers
    texts = [y.astype(str) for y in columns]
    found = np.unique(np.concatenate(texts))
    names = tuple(str(name) for name in (found if classes is None else classes))
    missing = sorted(set(found.tolist()) - set(names))
    if missing:
        raise InputError(
            f"{what!r} has the label {missing[0]!r}, which is none of the classes"
            f" {', '.join(names[:10])}: correct the labels or the class names"
        )
    position = {name: number for number, name in enumerate(names)}
    return names, [np.array([position[str(name)] for name in y], dtype=np.int64) for y in texts]


def _label_column(y: np.ndarray, what: str) -> np.ndarray:
    """One whole number or text for each example."""
    if y.ndim == 2 and y.shape[1] == 1:  # as in MedMNIST
        y = y[:, 0]
    if y.dtype == object:
        empty = sum(value is None or value != value for value in y.reshape(-1))  # NaN
        if empty:
            raise InputError(
                f"{what!r} has no label for {empty} of {len(y)} examples: fill in the labels or"
                " remove these rows"
            )
        y = np.array([value.item() if hasattr(value, "item") else value for value in y])
    if y.dtype.kind == "f" and np.isfinite(y).all() and (y == np.rint(y)).all():
        y = y.astype(np.int64)
    if y.ndim != 1 or y.dtype.kind not in "biuUS":
        raise InputError(
            f"{what!r} has labels of type {y.dtype} and shape {y.shape}: give one whole number or"
            " text for each example, since a model is trained to choose one class"
        )
    return y.astype(np.int64) if y.dtype.kind == "b" else y


def class_names(
    labels: Sequence[np.ndarray], classes: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """Return the class names that are given, or the numbers of the classes."""
    if classes is not None:
        return tuple(str(name) for name in classes)
    lowest, highest = (
        int(reduce([reduce(y, initial=0) for y in labels])) for reduce in (np.min, np.max)
    )
    if lowest < 0 or highest >= MAX_CLASSES:
        raise InputError(
            f"{what!r} has labels from {lowest} to {highest}: number the classes from 0, at"
            f" most {MAX_CLASSES} of them"
        )
    return tuple(str(label) for label in range(highest + 1))


def number_sites(
    sites: Sequence[np.ndarray | None],
) -> tuple[tuple[str, ...], list[np.ndarray | None]]:
    """The names of the sites, sorted, and the site of each example as a number."""
    given = [column.reshape(-1) for column in sites if column is not None]
    if not given:
        return (), [None] * len(sites)
    names = np.unique(np.concatenate(given))
    groups = [
        None if column is None else np.searchsorted(names, column.astype(names.dtype))
        for column in sites
    ]
    return tuple(str(name) for name in names), [
        None if group is None else group.astype(np.int64) for group in groups
    ]


def channels_first(x: np.ndarray, prefer_last: bool = False) -> np.ndarray:
    """Return images as [..., c, h, w]; `prefer_last` decides if both orders are possible."""
    return np.moveaxis(x, -1, -3) if has_channels_last(x.shape, prefer_last) else x


def has_channels_last(shape: tuple[int, ...], prefer_last: bool = False) -> bool:
    """Whether the last of the axes of images are channels."""
    return shape[-1] in CHANNELS and (prefer_last or shape[-3] not in CHANNELS)
