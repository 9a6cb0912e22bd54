"""`from_dataset`: what a Python program has in memory, as an `ArrayDataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core.errors import InputError
from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, dataset_bytes
from remanence.data.hub import hub_columns, is_hub_dataset
from remanence.data.own_arrays import LabeledArrays, assemble, channels_first, check_kind
from remanence.data.tables import frame_columns, label_columns

_PROBES = 8  # items that are compared with the arrays a dataset keeps


class _Read(NamedTuple):
    arrays: LabeledArrays
    classes: tuple[str, ...] | None


class _Columns(NamedTuple):
    """How users name the columns of tables."""

    label: str
    site: str
    input: str


def from_dataset(
    dataset: Any,
    test: Any = None,
    classes: Sequence[str] | None = None,
    name: str = "dataset",
    *,
    kind: str = "",
    label: str = "",
    site: str = "",
    input: str = "",
) -> ArrayDataset:
    """Copy data into memory.

    Whole numbers stay what they are, and floats are kept as float32. Leave out random transforms:
    each item is read once, so they would not change afterwards.

    Args:
        dataset: A torch dataset with a length whose items are (x, y, ...); a pair of arrays (x, y);
            a data frame of pandas; a dataset of Hugging Face; or a dictionary with one of these for
            each site, `{"ward-7": dataset, ...}`. Each site is a client, unless the settings name a
            partition. x is a PIL image, a tensor or an array; y is a whole number or a text.
        test: Test data in one of these forms. Default: a fifth of the examples of each class and
            site is held out.
        classes: The class names. Default: `dataset.classes`, the texts, or numbers.
        name: How messages and reports call it.
        kind: "image", "table", "tokens", "sequence" or "volume". Default: by axes and type. Whole
            numbers of two axes are gray images, floats of two axes are sequences.
        label: The column of labels, for data with columns.
        site: The column that names the site of each example, for data with columns.
        input: The column of inputs, for Hugging Face datasets.
    """
    check_kind(kind, name)
    if is_hub_dataset(dataset.get("train") if isinstance(dataset, dict) else None):
        dataset, test = dataset["train"], dataset.get("test") if test is None else test
    columns = _Columns(label, site, input)
    read = [
        _read(part, what, columns)
        for part, what in ((dataset, name), (test, f"{name} (test)"))
        if part is not None
    ]
    named, arrays = _join_classes([(one.arrays, one.classes) for one in read], name)
    return assemble(
        name,
        arrays,
        kind=kind,
        classes=classes if classes is not None else named,
        by_site=arrays[0].sites is not None,
        note=f"Data of {len(dataset)} sites."
        if isinstance(dataset, Mapping)
        else f"The dataset {type(dataset).__name__}.",
    )


def _read(data: Any, what: str, columns: _Columns) -> _Read:
    """Examples, labels and sites of data in any form."""
    if isinstance(data, Mapping):
        return _read_sites(data, what, columns)
    if is_hub_dataset(data):
        return _Read(*hub_columns(data, what, columns.label, columns.site, columns.input))
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas, which is not imported
        return _Read(*label_columns(frame_columns(data), what, columns.label, columns.site))
    if _is_pair(data):
        x, y = (_as_array(part) for part in data)
        x = channels_first(x, not isinstance(data[0], torch.Tensor)) if x.ndim == 4 else x
        return _Read(LabeledArrays(x, y), None)
    x, y = _stored_arrays(data, what) or _collect_items(data, what)
    given = getattr(data, "classes", None)
    named = isinstance(given, list | tuple) and all(isinstance(label, str) for label in given)
    return _Read(LabeledArrays(x, y), tuple(given) if named and given else None)


def _read_sites(sites: Mapping[Any, Any], what: str, columns: _Columns) -> _Read:
    """The examples of several sites, one after the other."""
    if not sites:
        raise InputError(f"{what!r} has no sites: give a dataset for each of them, by name")
    read = {str(name): _read(data, f"{what} {name}", columns) for name, data in sites.items()}
    named, arrays = _join_classes([(one.arrays, one.classes) for one in read.values()], what)
    first = next(iter(read))
    for name, part in zip(read, arrays, strict=True):
        if part.x.shape[1:] != arrays[0].x.shape[1:] or (part.x.dtype.kind == "f") != (
            arrays[0].x.dtype.kind == "f"
        ):
            raise InputError(
                f"{what!r} has examples of {part.x.dtype} {part.x.shape[1:]} at {name} and"
                f" {arrays[0].x.dtype} {arrays[0].x.shape[1:]} at {first}: give all sites the same"
                " shape and type"
            )
        if len(part.x) != len(part.y):
            raise InputError(
                f"{what!r} has {len(part.x)} examples but {len(part.y)} labels at {name}: give as"
                " many of each"
            )
    return _Read(
        LabeledArrays(
            np.concatenate([part.x for part in arrays]),
            np.concatenate([part.y for part in arrays]),
            np.repeat(list(read), [len(part.y) for part in arrays]),
        ),
        named,
    )


def _join_classes(
    parts: Sequence[tuple[LabeledArrays, tuple[str, ...] | None]], what: str
) -> tuple[tuple[str, ...] | None, list[LabeledArrays]]:
    """One list of class names for all parts. Where theirs differ, labels become names."""
    arrays = [part for part, _ in parts]
    named = [classes for _, classes in parts if classes is not None]
    if not named or all(classes == named[0] for classes in named):
        return (named[0] if named else None), arrays
    joined = []
    for part, classes in parts:
        if part.y.dtype.kind in "iu":
            if classes is None or not 0 <= part.y.min() <= part.y.max() < len(classes):
                raise InputError(
                    f"{what!r} has class names in some of its parts and other numbers in others:"
                    " give the classes of all, with classes=[...]"
                )
            part = part._replace(y=np.array(classes)[part.y])
        joined.append(part)
    return tuple(sorted(set().union(*named))), joined


def _is_pair(data: Any) -> bool:
    """Whether it is (x, y), not a list of two examples."""
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], torch.Tensor | np.ndarray)
        and isinstance(data[1], torch.Tensor | np.ndarray | list)
        and len(data[0]) == len(data[1])
        and data[0].ndim > 1
    )


def _stored_arrays(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the arrays a dataset keeps (.data and .targets, or .tensors), or None unless some of
    its items are equal to them, or are their bytes divided by 255.
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
        if label != y[row] or not _same_example(item, example):
            return None
    return channels_first(x, isinstance(data, np.ndarray)) if x.ndim == 4 else x, y.astype(np.int64)


def _same_example(item: np.ndarray, stored: np.ndarray) -> bool:
    """Whether an item is what is stored, or its bytes divided by 255, as ToTensor makes them."""
    if item.dtype == stored.dtype:
        return np.array_equal(item, stored)
    if stored.dtype != np.uint8 or item.dtype.kind != "f" or item.size != stored.size:
        return False
    return np.array_equal(
        item.reshape(stored.shape), stored.astype(item.dtype) / item.dtype.type(255)
    )


def _collect_items(dataset: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Read all items of a dataset one after the other."""
    size = _length(dataset, what)
    first, label = _get_item(dataset, 0, what)
    # a copy is made where a test set is held out
    check_memory(f"dataset {what!r}", dataset_bytes(size, 2 * size * first.nbytes))
    x, y = np.empty((size, *first.shape), dtype=first.dtype), [label]
    x[0] = first
    for row in range(1, size):
        item, label = _get_item(dataset, row, what)
        if item.shape != first.shape or item.dtype != first.dtype:
            shapes = f"{item.dtype} {item.shape} and the first {first.dtype} {first.shape}"
            raise InputError(
                f"dataset {what!r} cannot be used because item {row} is {shapes}: make all"
                " items equal in shape and type, for example with a resize"
            )
        if isinstance(label, str) != isinstance(y[0], str):
            raise InputError(
                f"dataset {what!r} has texts and numbers as labels: item {row} has {label!r:.60}"
                f" and the first {y[0]!r:.60}; write all labels the same way"
            )
        x[row] = item
        y.append(label)
    return x, np.array(y)


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


def _get_item(dataset: Any, row: int, what: str) -> tuple[np.ndarray, int | str]:
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise InputError(
            f"dataset {what!r} has no labels: item {row} is {type(item).__name__} where a pair"
            " (x, y) is needed"
        )
    if isinstance(item[1], str):
        return _to_example(item[0], what), str(item[1])
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
    """One input as an array: images [c, h, w], table rows float32 [f], tokens int64 [length]."""
    array = _as_array(x)
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2, 3, 4):
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
    return array


def _as_array(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return np.asarray(x.numpy(force=True))
    if hasattr(x, "mode") and hasattr(x, "convert"):  # a PIL image, without importing Pillow
        return np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"))
    return np.asarray(x)
