"""`npz`: your own arrays from one .npz file, with our names or those of MedMNIST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from remanence.core.expressions import PlainText
from remanence.data.dataset import (
    CHUNK_VALUES,
    CLASS_BYTES,
    ArrayDataset,
    check_fraction,
    dataset_bytes,
)
from remanence.data.files import damaged_file, resolve
from remanence.data.npz_reader import ArrayHeader, Headers, read_npz
from remanence.data.own_arrays import (
    MAX_CLASSES,
    LabeledArrays,
    assemble,
    check_kind,
    guess_kind_of,
    has_channels_last,
)

# MedMNIST's names (Yang et al. 2023); its validation examples are not used, since clients hold out
# their own
MEDMNIST = {
    "train_images": "x",
    "train_labels": "y",
    "test_images": "x_test",
    "test_labels": "y_test",
}
Item = TypeVar("Item")


def npz(
    root: Path | None, *, path: str = "", test: float = 0.2, kind: PlainText = ""
) -> ArrayDataset:
    """Arrays x and y, and optionally x_test, y_test, groups, groups_test, class_names, from one
    .npz file; or a file of MedMNIST (train_images, train_labels, ...).

    Images are x [n, h, w], [n, c, h, w] or [n, h, w, c]; x [n, f] is a table, or tokens if it holds
    integers wider than a byte; floats x [n, steps, f] are sequences. Labels are whole numbers or
    texts.

    Args:
        root: the data folder.
        path: the file, absolute or below the data folder or the current folder.
        test: the fraction of test examples if the file has no x_test.
        kind: "image", "table", "tokens", "sequence" or "volume"; default: by the rule above.
    """
    check_kind(kind, "npz")
    check_fraction(test)
    file = resolve("npz", root, path)
    arrays = _our_names(
        read_npz(file, lambda headers: _later_bytes(file, _our_names(headers), kind))
    )
    _check_names(file, arrays)
    ends = ("", "_test") if "x_test" in arrays else ("",)
    parts = [
        LabeledArrays(arrays[f"x{end}"], arrays[f"y{end}"], arrays.get(f"groups{end}"), f"x{end}")
        for end in ends
    ]
    classes = None
    if "class_names" in arrays:
        classes = [str(name) for name in arrays["class_names"].reshape(-1)]
    return assemble(
        str(file),
        parts,
        kind=kind,
        classes=classes,
        test=test,
        note=f"Arrays of {file.name}.",
        name="npz",
    )


def _our_names(arrays: Mapping[str, Item]) -> dict[str, Item]:
    """The arrays of MedMNIST by our names; others as they are."""
    if "train_images" not in arrays:
        return dict(arrays)
    return {MEDMNIST[name]: array for name, array in arrays.items() if name in MEDMNIST}


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
        "checks of the examples": min(CHUNK_VALUES, max((x.size for x in inputs), default=0)),
        "the groups": sum(group.size for group in groups) * (5 * widest + 32 + CLASS_BYTES),
        "the class names": 0
        if names is None
        else names.size * (CLASS_BYTES + names.dtype.itemsize),
    }


def _input_bytes(inputs: Sequence[ArrayHeader], kind: str, hold_out: bool) -> int:
    """The bytes that inputs take besides the arrays of the file."""
    converted = copied = 0
    for x in inputs:
        which = kind or guess_kind_of(len(x.shape), x.dtype)
        floats = which in ("table", "sequence") or x.dtype.kind == "f" or x.dtype.itemsize > 1
        wanted = np.dtype("i8" if which == "tokens" else "f4" if floats else "u1")
        moved = which == "image" and len(x.shape) == 4 and has_channels_last(x.shape)
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
