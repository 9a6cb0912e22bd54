"""What a text means that names data: the same in every command and in Python.

A name of `DATASETS`, an import path, or the path of a file or folder, each with options in
brackets: `digits`, `synthetic(samples=500)`, `my_package.data:load(n=3)`,
`patients.csv(label=outcome)`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from remanence.core.errors import InputError
from remanence.core.expressions import Call, parse_call
from remanence.core.imports import is_import_path
from remanence.data.hub import MARKS
from remanence.data.pfllib import client_files

SUFFIXES = {".npz": "npz", ".csv": "table", ".tsv": "table", ".parquet": "table"}
_FORM = re.compile(r"\s*(?P<name>[^()]+?)\s*(?P<options>\(.*\))?\s*", re.DOTALL)
FORMS = (
    "the name of a dataset (remanence list data), a .npz, .csv or .parquet file, or a folder of"
    " images"
)


def parse_data(text: str, known: Container[str]) -> Call:
    """The reader of the data that a text names, with its options.

    >>> str(parse_data("patients.csv(label=outcome)", ()))
    'table(path=patients.csv, label=outcome)'

    Args:
        text: As written after --data.
        known: The names of datasets.
    """
    form = _FORM.fullmatch(text)
    name, options = (form["name"], form["options"] or "") if form else (text, "")
    if Path(text).expanduser().is_dir():  # brackets may be part of its name
        name, options = text, ""
    if name in known or is_import_path(name):
        return parse_call(text)
    path = Path(name).expanduser()
    reader = _reader_of_folder(path) if path.is_dir() else SUFFIXES.get(path.suffix.lower())
    if reader is None:
        if "/" in name or path.is_file():
            there = "cannot be read as data" if path.exists() else "does not exist"
            raise InputError(f"{name} {there}: give {FORMS}")
        return parse_call(text)
    given = parse_call(f"{reader}{options}").arguments
    return Call(reader, {"path": str(path.resolve()) if path.exists() else name, **given})


def _reader_of_folder(folder: Path) -> str:
    if any((folder / mark).is_file() for mark in MARKS):
        return "hub"
    return "pfllib" if client_files(folder / "train") else "folder"
