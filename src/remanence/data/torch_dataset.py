"""`from_dataset`: a torch dataset as an `ArrayDataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from remanence.core.errors import InputError
from remanence.core.memory import check_memory
from remanence.data.dataset import (
    ArrayDataset,
    DatasetSplit,
    dataset_bytes,
    hold_out_test,
    validate,
)
from remanence.data.user_data import as_examples, channels_first, class_names, guess_kind

_PROBES = 8  # items that are compared with the arrays a dataset keeps


def from_dataset(
    dataset: Any, test: Any = None, classes: Sequence[str] | None = None, name: str = "dataset"
) -> ArrayDataset:
    """Copy a torch dataset into memory.

    Leave out random transforms: each item is read once, so they would not change afterwards.

    Args:
        dataset: any dataset with a length whose items are (x, y, ...). x is a PIL image; a tensor
            or array of an image (uint8, or floats from 0 to 1); one axis of floats (a table) or of
            integers (tokens). y is an integer.
        test: another such dataset; default: a fifth of the examples is held out.
        classes: the class names; default: `dataset.classes`, or numbers.
        name: how messages and reports call it.
    """
    splits, kind = [], ""
    for part, what in ((dataset, name), (test, f"{name} (test)")):
        if part is not None:
            x, y = _stored_arrays(part, what) or _collect_items(part, what)
            kind = kind or guess_kind(x)
            splits.append(DatasetSplit(as_examples(x, kind, what), y))
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
            class_names(splits, classes, name),
            splits[0],
            splits[1],
            note=f"The dataset {type(dataset).__name__}.",
        )
    )


def _stored_arrays(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the arrays a dataset keeps (.data and .targets, or .tensors), or None unless some of
    its items are equal to them.
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
        examples = [_to_example(data[row], what) for row in rows]
    except ValueError:  # ragged lists, or images that need the dataset's own transform
        return None
    for row, example in zip(rows, examples, strict=True):
        item, label = _get_item(dataset, row, what)
        if label != y[row] or item.dtype != example.dtype or not np.array_equal(item, example):
            return None
    return channels_first(x, isinstance(data, np.ndarray)) if x.ndim == 4 else x, y.astype(np.int64)


def _collect_items(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Read all items of a dataset one after the other."""
    size = _length(dataset, what)
    first, label = _get_item(dataset, 0, what)
    # a copy is made where a test set is held out
    check_memory(f"dataset {what!r}", dataset_bytes(size, 2 * size * first.nbytes))
    x, y = np.empty((size, *first.shape), dtype=first.dtype), np.empty(size, dtype=np.int64)
    x[0], y[0] = first, label
    for row in range(1, size):
        item, y[row] = _get_item(dataset, row, what)
        if item.shape != first.shape or item.dtype != first.dtype:
            shapes = f"{item.dtype} {item.shape} and the first {first.dtype} {first.shape}"
            raise InputError(
                f"dataset {what!r} cannot be used because item {row} is {shapes}: make all"
                " items equal in shape and type, for example with a resize"
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


def _get_item(dataset: Any, row: int, what: str) -> tuple[np.ndarray, int]:
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
    return _to_example(item[0], what), int(label)


def _to_example(x: Any, what: str) -> np.ndarray:
    """Convert one input: images to uint8 [c, h, w], table rows to float32 [f], tokens to
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
        array = channels_first(array, prefer_last=not isinstance(x, torch.Tensor))
    return np.asarray(as_examples(array[None], "image", what)[0])


def _as_array(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return np.asarray(x.numpy(force=True))
    if hasattr(x, "mode") and hasattr(x, "convert"):  # a PIL image, without importing Pillow
        return np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    return np.asarray(x)
