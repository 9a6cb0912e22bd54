"""`npz`: your own arrays, and the conversion of arrays to the types of an `ArrayDataset`, which
`torch_dataset.py` shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.data.dataset import (
    CLASS_BYTES,
    INPUT_KINDS,
    ArrayDataset,
    DatasetSplit,
    check_fraction,
    dataset_bytes,
    hold_out_test,
    validate,
)
from remanence.data.files import damaged_file, resolve
from remanence.data.npz_reader import ArrayHeader, Headers, read_npz

CHANNELS = (1, 3, 4)
MAX_CLASSES = 100_000


def npz(
    root: Path | None, *, path: str = "", test: float = 0.2, kind: PlainText = ""
) -> ArrayDataset:
    """Arrays x and y, and optionally x_test, y_test, groups, groups_test, class_names, from one
    .npz file.

    x [n, h, w], [n, c, h, w] or [n, h, w, c] are images (uint8, or floats from 0 to 1); x [n, f] is
    a table, or tokens if it holds integers wider than a byte.

    Args:
        root: the data folder.
        path: the file, absolute or below the data folder or the current folder.
        test: the fraction of test examples if the file has no x_test.
        kind: "image", "table" or "tokens"; default: by the rule above.
    """
    if kind and kind not in INPUT_KINDS:
        raise InputError(
            f"dataset 'npz' has no kind {kind!r}: choose one of {', '.join(INPUT_KINDS)} or leave"
            " it out"
        )
    check_fraction(test)
    file = resolve("npz", root, path)
    arrays = read_npz(file, lambda headers: _later_bytes(file, headers, kind))
    _check_names(file, arrays)
    kind = kind or guess_kind(arrays["x"])
    names = _group_names(arrays)
    ends = ("", "_test") if "x_test" in arrays else ("",)
    splits = [_read_split(file, arrays, end, kind, names) for end in ends]
    if len(splits) == 1:
        splits = list(hold_out_test(splits[0], test))
    classes = None
    if "class_names" in arrays:
        classes = [str(name) for name in arrays["class_names"].reshape(-1)]
    return validate(
        ArrayDataset(
            "npz",
            kind,
            class_names(splits, classes, str(file)),
            splits[0],
            splits[1],
            tuple(str(name) for name in names),
            f"Arrays of {file.name}.",
        )
    )


def _later_bytes(file: Path, headers: Headers, kind: str) -> dict[str, int]:
    """The bytes that arrays of these shapes and types take when they become a dataset."""
    names = headers.get("class_names")
    if names is not None and names.size > MAX_CLASSES:
        raise damaged_file(
            file, f"at most {MAX_CLASSES} class names", f"{names.size}", "correct class_names"
        )
    inputs = [headers[name] for name in ("x", "x_test") if name in headers]
    labels = [headers[name] for name in ("y", "y_test") if name in headers]
    groups = [headers[name] for name in ("groups", "groups_test") if name in headers]
    # texts of different lengths are all made as long as the longest, sorted and compared; numbers
    # beside texts become texts
    widest = max((max(group.dtype.itemsize, CLASS_BYTES) for group in groups), default=0)
    examples = sum(y.size for y in labels)
    return {
        **dataset_bytes(examples, _input_bytes(inputs, kind, "x_test" not in headers)),
        "the groups": sum(group.size for group in groups) * (5 * widest + 32 + CLASS_BYTES),
        "the class names": 0
        if names is None
        else names.size * (CLASS_BYTES + names.dtype.itemsize),
    }


def _input_bytes(inputs: Sequence[ArrayHeader], kind: str, hold_out: bool) -> int:
    """The bytes that inputs take besides the arrays of the file."""
    converted = copied = 0
    for x in inputs:
        which = kind or _guess_kind(len(x.shape), x.dtype)
        wanted = np.dtype({"table": "f4", "tokens": "i8"}.get(which, "u1"))
        moved = which == "image" and len(x.shape) == 4 and _has_channels_last(x.shape)
        if x.dtype != wanted or moved:
            converted += x.size * wanted.itemsize
        scaled = x.size * 2 * x.dtype.itemsize if which == "image" and x.dtype.kind == "f" else 0
        copied += max(scaled, x.size * wanted.itemsize if hold_out else 0)
    return converted + copied


def _check_names(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Check that the file has x and y, and x_test and y_test together or not at all."""
    if not {"x", "y"} <= arrays.keys():
        found = ", ".join(f"{name} ({array.dtype})" for name, array in sorted(arrays.items()))
        raise damaged_file(
            file, "arrays x and y", found or "none", "save it with numpy.savez(file, x=..., y=...)"
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise damaged_file(
            file,
            "x_test and y_test together or neither",
            "one of them",
            "save both or leave both out",
        )


def _read_split(
    file: Path, arrays: dict[str, np.ndarray], end: str, kind: str, names: np.ndarray
) -> DatasetSplit:
    """Return the split whose arrays end in `end`; groups are positions in `names`."""
    groups = arrays.get(f"groups{end}")
    if groups is not None:
        groups = np.searchsorted(names, groups.astype(names.dtype)).astype(np.int64)
    x = as_examples(arrays[f"x{end}"], kind, str(file))
    y = _as_labels(arrays[f"y{end}"], str(file))
    if len(x) != len(y) or (groups is not None and groups.shape != y.shape):
        raise damaged_file(
            file,
            f"as many rows in x{end}, y{end} and groups{end}",
            f"{len(x)} and {len(y)}",
            "save equally long arrays",
        )
    return DatasetSplit(x, y, groups)


def _group_names(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the groups of both splits, sorted; their positions are the group numbers."""
    return np.unique(
        np.concatenate(
            [arrays[name].reshape(-1) for name in ("groups", "groups_test") if name in arrays]
            or [np.empty(0, dtype=np.int64)]
        )
    )


def _as_labels(y: np.ndarray, what: str) -> np.ndarray:
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise InputError(
            f"{what!r} has labels of type {y.dtype} and shape {y.shape}: give one integer for"
            " each example"
        )
    return y.astype(np.int64)


def guess_kind(x: np.ndarray) -> str:
    """Return "image", "table" or "tokens" by the shape and the type of the inputs."""
    return _guess_kind(x.ndim, x.dtype)


def _guess_kind(axes: int, dtype: np.dtype) -> str:
    if axes != 2:
        return "image"
    return "tokens" if dtype.kind in "iu" and dtype.itemsize > 1 else "table"


def as_examples(x: np.ndarray, kind: str, what: str) -> np.ndarray:
    """Convert inputs to the type and axes of this kind; `what` names them in errors."""
    if x.dtype.kind not in ("biu" if kind == "tokens" else "biuf"):
        raise InputError(
            f"{what!r} has examples of type {x.dtype}: give"
            f" {'whole ' if kind == 'tokens' else ''}numbers for the kind {kind!r}"
        )
    if kind == "tokens":
        return x.astype(np.int64, copy=False)
    if kind == "table":
        # values beyond float32 become infinity, which `validate` rejects
        with np.errstate(over="ignore"):
            return x.astype(np.float32, copy=False)
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4:
        raise InputError(
            f"{what!r} has images of shape {x.shape[1:]}: give [height, width], [channels,"
            " height, width] or [height, width, channels]"
        )
    x = channels_first(x)
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


def channels_first(x: np.ndarray, prefer_last: bool = False) -> np.ndarray:
    """Return images as [..., c, h, w]; `prefer_last` decides if both orders are possible."""
    return np.moveaxis(x, -1, -3) if _has_channels_last(x.shape, prefer_last) else x


def _has_channels_last(shape: tuple[int, ...], prefer_last: bool = False) -> bool:
    return shape[-1] in CHANNELS and (prefer_last or shape[-3] not in CHANNELS)


def class_names(
    splits: Sequence[DatasetSplit], classes: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """Return the class names that are given, or the numbers of the classes."""
    if classes is not None:
        return tuple(classes)
    lowest, highest = (
        int(reduce([reduce(split.y, initial=0) for split in splits])) for reduce in (np.min, np.max)
    )
    if lowest < 0 or highest >= MAX_CLASSES:
        raise InputError(
            f"{what!r} has labels from {lowest} to {highest}: number the classes from 0, at"
            f" most {MAX_CLASSES} of them"
        )
    return tuple(str(label) for label in range(highest + 1))
