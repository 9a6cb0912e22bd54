"""Your own data: arrays in an .npz file, or any torch dataset of (x, y) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remanence.core.errors import InputError
from remanence.data.dataset import (
    INPUT_KINDS,
    ArrayDataset,
    DatasetSplit,
    check_fraction,
    hold_out_test,
    validate,
)
from remanence.data.files import damaged_file, resolve
from remanence.data.npz_reader import read_npz

CHANNELS = (1, 3, 4)
MOST_CLASSES = 100_000
_PROBES = 8


def npz(root: Path | None, *, path: str = "", test: float = 0.2, kind: str = "") -> ArrayDataset:
    """Arrays x and y, and optionally x_test, y_test, groups, groups_test, class_names, from one
    .npz file.

    x [n, h, w], [n, c, h, w] or [n, h, w, c] are images (uint8, or floats from 0 to 1); x [n, f] is
    a table, or tokens where it holds integers wider than a byte; `kind` settles what this rule
    would guess wrongly. Without x_test a share `test` is held out.
    """
    if kind and kind not in INPUT_KINDS:
        raise InputError(
            f"dataset 'npz' has no kind {kind!r}: choose one of {', '.join(INPUT_KINDS)} or leave it out"
        )
    check_fraction(test)
    file = resolve("npz", root, path)
    arrays = read_npz(file)
    if not {"x", "y"} <= arrays.keys():
        found = (
            ", ".join(f"{name} ({array.dtype})" for name, array in sorted(arrays.items())) or "none"
        )
        raise damaged_file(
            file, "arrays x and y", found, "save it with numpy.savez(file, x=..., y=...)"
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise damaged_file(
            file,
            "x_test and y_test together or neither",
            "one of them",
            "save both or leave both out",
        )
    kind = kind or _guess_kind(arrays["x"])
    splits, names = [], _group_names(arrays)
    for end in ("", "_test") if "x_test" in arrays else ("",):
        groups = arrays.get(f"groups{end}")
        if groups is not None:
            groups = np.searchsorted(names, groups.astype(names.dtype)).astype(np.int64)
        splits.append(
            DatasetSplit(
                _as_examples(arrays[f"x{end}"], kind, str(file)),
                _as_labels(arrays[f"y{end}"], str(file)),
                groups,
            )
        )
        if len(splits[-1].x) != len(splits[-1].y) or (
            groups is not None and groups.shape != splits[-1].y.shape
        ):
            raise damaged_file(
                file,
                f"as many rows in x{end}, y{end} and groups{end}",
                f"{len(splits[-1].x)} and {len(splits[-1].y)}",
                "save equally long arrays",
            )
    if len(splits) == 1:
        splits = list(hold_out_test(splits[0], test))
    classes = (
        [str(name) for name in arrays["class_names"].reshape(-1)]
        if "class_names" in arrays
        else None
    )
    named = tuple(str(name) for name in names)
    return validate(
        ArrayDataset(
            "npz",
            kind,
            _class_names(splits, classes, str(file)),
            splits[0],
            splits[1],
            named,
            f"Arrays of {file.name}.",
        )
    )


def from_dataset(
    dataset: Any, test: Any = None, classes: Sequence[str] | None = None, name: str = "dataset"
) -> ArrayDataset:
    """A `ArrayDataset` from any torch dataset with a length whose items are (x, y, ...).

    x: a PIL image; a tensor or array of an image (uint8, or floats from 0 to 1); one axis of floats
        (a table) or of integers (tokens).
    y: an integer. `test` is another such dataset; without it a fifth of the examples is held out.
    Leave random transforms out: they would be frozen as first drawn.
    """
    splits, kind = [], ""
    for part, what in ((dataset, name), (test, f"{name} (test)")):
        if part is not None:
            x, y = _stored(part, what) or _iterated(part, what)
            kind = kind or _guess_kind(x)
            splits.append(DatasetSplit(_as_examples(x, kind, what), y))
    if len(splits) == 1:
        splits = list(hold_out_test(splits[0], 0.2))
    if classes is None:
        given = getattr(dataset, "classes", None)
        classes = (
            given
            if isinstance(given, list | tuple) and all(isinstance(label, str) for label in given)
            else None
        )
    return validate(
        ArrayDataset(
            name,
            kind,
            _class_names(splits, classes, name),
            splits[0],
            splits[1],
            note=f"The dataset {type(dataset).__name__}.",
        )
    )


def _stored(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The arrays a dataset keeps (.data and .targets, or .tensors), where probing items shows
    that these are what it hands out.
    """
    tensors = getattr(dataset, "tensors", None)
    kept = (
        tensors
        if isinstance(tensors, tuple) and len(tensors) == 2
        else [getattr(dataset, name, None) for name in ("data", "targets")]
    )
    data: Any = kept[0]
    if not isinstance(data, torch.Tensor | np.ndarray) or not isinstance(
        kept[1], torch.Tensor | np.ndarray | list
    ):
        return None
    size = _length(dataset, what)
    try:
        x, y = _as_array(data), _as_array(kept[1])
        if (
            x.shape[:1] != (size,)
            or y.shape != (size,)
            or y.dtype.kind not in "iu"
            or x.dtype.kind not in "iuf"
        ):
            return None
        rows = sorted({round(step * (size - 1) / (_PROBES - 1)) for step in range(_PROBES)})
        examples = [_plain(data[row], what) for row in rows]
    except ValueError:  # not plain: ragged lists, images that need the dataset's own transform
        return None
    for row, example in zip(rows, examples, strict=True):
        item, label = _item(dataset, row, what)
        if label != y[row] or item.dtype != example.dtype or not np.array_equal(item, example):
            return None
    return _channels_first(x, isinstance(data, np.ndarray)) if x.ndim == 4 else x, y.astype(
        np.int64
    )


def _iterated(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    size = _length(dataset, what)
    first, label = _item(dataset, 0, what)
    x, y = np.empty((size, *first.shape), dtype=first.dtype), np.empty(size, dtype=np.int64)
    x[0], y[0] = first, label
    for row in range(1, size):
        item, y[row] = _item(dataset, row, what)
        if item.shape != first.shape or item.dtype != first.dtype:
            shapes = f"{item.dtype} {item.shape} and the first {first.dtype} {first.shape}"
            raise InputError(
                f"dataset {what!r} cannot be used because item {row} is {shapes}: make all"
                " items alike, for example with a resize"
            )
        x[row] = item
    return x, y


def _length(dataset: Any, what: str) -> int:
    try:
        size = len(dataset)
    except TypeError:
        raise InputError(
            f"dataset {what!r} has no length: give a map-style dataset, for example list(dataset)"
        ) from None
    if not size:
        raise InputError(f"dataset {what!r} is empty: give at least one example")
    return size


def _item(dataset: Any, row: int, what: str) -> tuple[np.ndarray, int]:
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise InputError(
            f"dataset {what!r} has no labels: item {row} is {type(item).__name__} where a pair"
            " (x, y) is needed"
        )
    label = (
        _as_array(item[1])
        if isinstance(item[1], int | np.integer | np.ndarray | torch.Tensor)
        else None
    )
    if label is None or label.ndim or label.dtype.kind not in "iub":
        raise InputError(
            f"dataset {what!r} has no class number as label: item {row} has {item[1]!r:.60}"
            " where an integer is needed"
        )
    return _plain(item[0], what), int(label)


def _plain(x: Any, what: str) -> np.ndarray:
    """One example as the array we keep: images uint8 [c, h, w], tables float32 [f], tokens
    int64 [length].
    """
    array = _as_array(x)
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2, 3):
        raise InputError(
            f"dataset {what!r} has examples of type {type(x).__name__} and shape"
            f" {array.shape}: give images, rows of numbers or tokens"
        )
    if array.ndim == 1:
        return array.astype(
            np.int64 if array.dtype.kind in "iu" and array.dtype.itemsize > 1 else np.float32
        )
    if array.ndim == 3:
        array = _channels_first(array, prefer_last=not isinstance(x, torch.Tensor))
    return np.asarray(_as_examples(array[None], "image", what)[0])


def _as_array(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return np.asarray(x.numpy(force=True))
    if hasattr(x, "mode") and hasattr(x, "convert"):  # a PIL image, known without importing Pillow
        return np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    return np.asarray(x)


def _channels_first(x: np.ndarray, prefer_last: bool = False) -> np.ndarray:
    """Images [..., c, h, w] from either order; where both could be, tensors have channels
    first, arrays and PIL images last.
    """
    if x.shape[-1] in CHANNELS and (prefer_last or x.shape[-3] not in CHANNELS):
        return np.moveaxis(x, -1, -3)
    return x


def _guess_kind(x: np.ndarray) -> str:
    if x.ndim != 2:
        return "image"
    return "tokens" if x.dtype.kind in "iu" and x.dtype.itemsize > 1 else "table"


def _as_examples(x: np.ndarray, kind: str, what: str) -> np.ndarray:
    if x.dtype.kind not in ("biu" if kind == "tokens" else "biuf"):
        raise InputError(
            f"{what!r} has examples of type {x.dtype}: give"
            f" {'whole ' if kind == 'tokens' else ''}numbers for the kind {kind!r}"
        )
    if kind == "tokens":
        return x.astype(np.int64, copy=False)
    if kind == "table":
        # what leaves float32 becomes infinity, which is refused with its own sentence
        with np.errstate(over="ignore"):
            return x.astype(np.float32, copy=False)
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4:
        raise InputError(
            f"{what!r} has images of shape {x.shape[1:]}: give [height, width], [channels,"
            " height, width] or [height, width, channels]"
        )
    x = _channels_first(x)
    if x.dtype.kind == "f":
        if not (np.isfinite(x).all() and (x >= 0).all() and (x <= 1).all()):
            raise InputError(
                f"{what!r} has images with values outside 0 to 1: give raw images and"
                " leave out normalization, which is done later"
            )
        x = np.rint(x * x.dtype.type(255))
    elif x.dtype != np.uint8 and x.size and (x.min() < 0 or x.max() > 255):
        raise InputError(
            f"{what!r} has images of whole numbers from {x.min()} to {x.max()}: give bytes"
            " from 0 to 255 or floats from 0 to 1"
        )
    return np.ascontiguousarray(x, dtype=np.uint8)


def _as_labels(y: np.ndarray, what: str) -> np.ndarray:
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise InputError(
            f"{what!r} has labels of type {y.dtype} and shape {y.shape}: give one integer for"
            " each example"
        )
    return y.astype(np.int64)


def _group_names(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """All groups of both splits, sorted: their places are the group numbers."""
    return np.unique(
        np.concatenate(
            [arrays[name].reshape(-1) for name in ("groups", "groups_test") if name in arrays]
            or [np.empty(0, dtype=np.int64)]
        )
    )


def _class_names(
    splits: Sequence[DatasetSplit], classes: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    if classes is not None:
        return tuple(classes)
    lowest, highest = (
        int(pick([pick(split.y, initial=0) for split in splits])) for pick in (np.min, np.max)
    )
    if lowest < 0 or highest >= MOST_CLASSES:
        raise InputError(
            f"{what!r} has labels from {lowest} to {highest}: number the classes from 0, at"
            f" most {MOST_CLASSES} of them"
        )
    return tuple(str(label) for label in range(highest + 1))
