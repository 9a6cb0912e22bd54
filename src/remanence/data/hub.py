"""Datasets of Hugging Face (`datasets`): objects, and folders that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError, first_line, nearest
from remanence.core.expressions import PlainText
from remanence.data.dataset import ArrayDataset, check_fraction
from remanence.data.files import damaged_file, resolve
from remanence.data.own_arrays import LabeledArrays, assemble, channels_first, check_kind
from remanence.data.tables import LABELS, SITE, LabeledTable, label_columns

INPUTS = ("image", "img", "x", "input", "input_ids", "pixel_values", "features", "audio")
MARKS = ("dataset_dict.json", "dataset_info.json")  # files of `save_to_disk`


def is_hub_dataset(data: Any) -> bool:
    """Whether an object is a `datasets.Dataset`; the library is not imported."""
    return hasattr(data, "column_names") and hasattr(data, "features") and hasattr(data, "select")


def hub(
    root: Path | None,
    *,
    path: str = "",
    input: PlainText = "",
    label: PlainText = "",
    site: PlainText = "",
    test: float = 0.2,
    kind: PlainText = "",
) -> ArrayDataset:
    """A folder that `save_to_disk` of Hugging Face's `datasets` wrote, with its splits train and
    test, or one split.

    Args:
        root: the data folder.
        path: the folder, absolute or below the data folder or the current folder.
        input: the column of inputs; default: image, x, input_ids or features, or all columns of
            numbers.
        label: the column of labels; default: label, y, target or class.
        site: the column that names the site of each example; each site is a client.
        test: the fraction of test examples if there is no split test.
        kind: "image", "table", "tokens", "sequence" or "volume"; default: by axes and type.
    """
    check_kind(kind, "hub")
    check_fraction(test)
    folder = resolve("hub", root, path)
    try:
        from datasets import load_from_disk
    except ImportError:
        raise InputError(
            f"{folder} is a dataset of Hugging Face, whose library is not installed: pip install"
            " 'remanence-fl[hub]'"
        ) from None
    try:
        loaded = load_from_disk(str(folder))
    except Exception as error:  # the library raises nearly anything on a damaged folder
        raise damaged_file(
            folder, "a folder of save_to_disk", first_line(error), "save it again"
        ) from None
    parts = [loaded] if is_hub_dataset(loaded) else _splits(loaded, str(folder))
    read = [hub_columns(part, str(folder), label, site, input) for part in parts]
    return assemble(
        str(folder),
        [one.arrays for one in read],
        kind=kind,
        classes=read[0].classes,
        test=test,
        by_site=read[0].arrays.sites is not None,
        note=f"The dataset {folder.name}.",
        name=folder.name,
    )


def _splits(loaded: Any, what: str) -> list[Any]:
    if "train" not in loaded:
        raise InputError(
            f"{what!r} has the splits {', '.join(loaded)} and no train: name the folder of one"
            " split"
        )
    return [loaded[name] for name in ("train", "test") if name in loaded]


def hub_columns(
    data: Any, what: str, label: str = "", site: str = "", input: str = ""
) -> LabeledTable:
    """Inputs, labels and sites of a dataset, and its class names where it has any.

    Args:
        data: A `datasets.Dataset`.
        what: Names it in errors.
        label: The column of labels. Default: the first of `LABELS` that is there.
        site: The column of sites. Default: site, where there is one.
        input: The column of inputs. Default: the first of `INPUTS`, or all columns of numbers.
    """
    names = list(data.column_names)
    for name in filter(None, (label, site, input)):
        if name not in names:
            raise InputError(f"{what!r} has no column {name!r}: {nearest(name, names)}")
    label = label or next((name for name in LABELS if name in names), "")
    input = input or next((name for name in INPUTS if name in names), "")
    if not input or not label:
        columns = {name: np.asarray(data[name][:]) for name in names}
        return label_columns(columns, what, label, site)
    site = site or (SITE if SITE in names else "")
    classes = getattr(data.features[label], "names", None)
    x = _stack(data[input][:], what, input)
    sites = np.asarray(data[site][:]).astype(str) if site else None
    arrays = LabeledArrays(x, np.asarray(data[label][:]), sites, input)
    return LabeledTable(arrays, None if classes is None else tuple(classes))


def _stack(items: Sequence[Any], what: str, column: str) -> np.ndarray:
    """Images or lists of numbers as one array."""
    arrays = []
    for item in items:
        picture = hasattr(item, "mode") and hasattr(item, "convert")
        array = np.asarray(
            item.convert("RGB") if picture and item.mode not in ("L", "RGB") else item
        )
        arrays.append(channels_first(array, True) if array.ndim == 3 else array)
    if len({array.shape for array in arrays}) > 1 or arrays[0].dtype.kind not in "biuf":
        raise InputError(
            f"column {column!r} of {what!r} does not hold numbers or images of one size: resize or"
            " pad them, or name another column with input=..."
        )
    return np.stack(arrays)
