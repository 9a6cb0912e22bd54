"""Tables with one row for each example: .csv and .parquet files, and data frames of pandas."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remanence.core.errors import InputError, nearest
from remanence.core.expressions import PlainText
from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, check_fraction
from remanence.data.files import damaged_file, resolve
from remanence.data.own_arrays import LabeledArrays, assemble

LABELS = ("label", "y", "target", "class")  # taken for the column of labels where none is named
SITE = "site"
_CELL_BYTES = 80  # of a short text in memory, with its place in a list, and as a number
Columns = Mapping[str, np.ndarray]


class LabeledTable(NamedTuple):
    """The examples of a table, and the class names in their order where labels are numbers."""

    arrays: LabeledArrays
    classes: tuple[str, ...] | None


def table(
    root: Path | None,
    *,
    path: str = "",
    label: PlainText = "",
    site: PlainText = "",
    drop: PlainText = "",
    test: float = 0.2,
) -> ArrayDataset:
    """A .csv or .parquet file with one row for each example. All columns but those of the label and
    the site are inputs.

    Args:
        root: the data folder.
        path: the file, absolute or below the data folder or the current folder.
        label: the column of labels, numbers or texts; default: label, y, target or class.
        site: the column that names the site of each row; each site is a client. Default: site,
            where there is one.
        drop: columns that are left out, separated by commas.
        test: the fraction of each site and class that is held out for testing.
    """
    check_fraction(test)
    file = resolve("table", root, path)
    columns = read_columns(file)
    dropped = [name.strip() for name in drop.split(",") if name.strip()]
    found = label_columns(columns, str(file), label, site, dropped)
    return assemble(
        str(file),
        [found.arrays],
        kind="table",
        classes=found.classes,
        test=test,
        by_site=found.arrays.sites is not None,
        note=f"The table {file.name}.",
        name=file.stem,
    )


def read_columns(file: Path) -> Columns:
    """The columns of a .csv or .parquet file by name."""
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file)
    size = file.stat().st_size
    check_memory(file, {"the rows": size + size // 2 * _CELL_BYTES})
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            first = opened.readline()
            opened.seek(0)
            separator = max(",;\t", key=first.count)
            header, *rows = [row for row in csv.reader(opened, delimiter=separator) if row]
    except (ValueError, csv.Error) as error:
        reason = str(error) if isinstance(error, csv.Error | UnicodeDecodeError) else "no rows"
        raise damaged_file(file, "a table with a header line", reason, "save it again") from None
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise damaged_file(
            file, "columns with different names", f"{twice!r} twice", "rename one of them"
        )
    wrong = next((number for number, row in enumerate(rows) if len(row) != len(header)), None)
    if wrong is not None:
        found = f"{len(rows[wrong])} in row {wrong + 1}"
        raise damaged_file(file, f"{len(header)} columns in every row", found, "correct that row")
    return {
        name.strip(): _as_numbers([row[place].strip() for row in rows])
        for place, name in enumerate(header)
    }


def _as_numbers(cells: Sequence[str]) -> np.ndarray:
    """Texts as whole numbers or floats, if all of them are; an empty text is a missing number."""
    for kind in (np.int64, np.float64):
        try:
            return np.array([cell or "nan" for cell in cells], dtype=object).astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.array(cells)


def _read_parquet(file: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError(
            "a .parquet file needs pyarrow, which is not installed: pip install"
            " 'remanence-fl[parquet]', or save the table as .csv"
        ) from None
    try:
        about = parquet.read_metadata(file)
        groups = (about.row_group(number) for number in range(about.num_row_groups))
        check_memory(file, {"the columns": 3 * sum(group.total_byte_size for group in groups)})
        read = parquet.ParquetFile(file).read()
        return {name: read.column(name).to_numpy() for name in read.column_names}
    except (ArrowException, OSError, ValueError, KeyError) as error:
        raise damaged_file(
            file, "a complete .parquet file", f"a broken one ({error})", "save it again"
        ) from None


def frame_columns(frame: Any) -> Columns:
    """The columns of a data frame of pandas."""
    return {str(name): np.asarray(frame[name].to_numpy()) for name in frame.columns}


def label_columns(
    columns: Columns, what: str, label: str = "", site: str = "", drop: Sequence[str] = ()
) -> LabeledTable:
    """Divide columns into inputs, labels and sites.

    Args:
        columns: All columns, by name.
        what: Names the table in errors.
        label: The column of labels. Default: the first of `LABELS` that is there.
        site: The column of sites. Default: site, where there is one.
        drop: Columns that are left out.
    """
    for name in filter(None, (label, site, *drop)):
        if name not in columns:
            raise InputError(f"{what!r} has no column {name!r}: {nearest(name, columns)}")
    label = label or next((name for name in LABELS if name in columns), "")
    if not label:
        raise InputError(
            f"{what!r} has the columns {', '.join(list(columns)[:12])}: name that of the labels"
            " with label=..."
        )
    site = site or (SITE if SITE in columns and label != SITE else "")
    inputs = [name for name in columns if name not in (label, site, *drop)]
    if not inputs:
        raise InputError(f"{what!r} has no columns besides {label}: add columns of numbers")
    y, classes = _label_names(columns[label])
    x = np.stack([_number_column(columns[name], name, what) for name in inputs], axis=1)
    _check_missing(x, inputs, what)
    sites = columns[site].astype(str) if site else None
    return LabeledTable(LabeledArrays(x, y, sites, "columns"), classes)


def _label_names(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Numbers that do not count from 0 become names, in the order of the numbers."""
    if y.dtype.kind not in "iu":
        return y, None
    found = np.unique(y)
    if np.array_equal(found, np.arange(len(found))):
        return y, None
    return y.astype(str), tuple(str(number) for number in found)


def _number_column(column: np.ndarray, name: str, what: str) -> np.ndarray:
    try:
        if column.dtype.kind in "US":
            raise ValueError
        return column.astype(np.float64)
    except (ValueError, TypeError):
        raise InputError(
            f"column {name!r} of {what!r} holds {_example(column)} where numbers are needed: encode"
            f" it as numbers, leave it out with drop={name}, or write site={name} if it names sites"
        ) from None


def _example(column: np.ndarray) -> str:
    return repr(str(next((cell for cell in column if cell is not None), "")))[:40]


def _check_missing(x: np.ndarray, names: Sequence[str], what: str) -> None:
    bad = ~np.isfinite(x)
    if bad.any():
        where = [name for name, column in zip(names, bad.T, strict=True) if column.any()]
        raise InputError(
            f"{what!r} holds NaN, infinity or nothing in {int(bad.any(axis=1).sum())} of {len(x)}"
            f" rows (columns {', '.join(where[:6])}): fill in the values, or remove these rows"
        )
