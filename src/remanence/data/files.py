"""Find the files of a dataset below the data folder; errors for missing and damaged files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remanence.core.errors import InputError
from remanence.data.downloads import DOWNLOADS

WHERE = "--data-dir or REMANENCE_DATA"


def find_files(
    dataset: str, root: Path | None, choices: Sequence[tuple[str, Sequence[str]]], get: str
) -> Path:
    """Return the first complete folder of a dataset.

    Args:
        dataset: its name, for errors.
        root: the data folder.
        choices: (folder below root, names it must hold); a name may also end in .gz.
        get: how to get the files, as part of a sentence: "unpack x.tar.gz from ...".
    """
    if dataset in DOWNLOADS:
        get = f"get it with remanence data fetch {dataset} --data-dir DIR, or {get}"
    if root is None:
        raise InputError(
            f"dataset {dataset!r} reads files but no data folder is set: {get} in a folder"
            f" of your choice and name it with {WHERE}"
        )
    if not root.is_dir():
        raise InputError(
            f"dataset {dataset!r} cannot be read because the data folder {root} does not exist:"
            f" name the right one with {WHERE}"
        )
    partial = []
    for folder, names in choices:
        absent = [name for name in names if not has_files(root / folder, name)]
        if not absent:
            return root / folder
        if len(absent) < len(names):
            partial.append(f"{folder} lacks {_listed(absent)}")
    folders: dict[str, list[str]] = {}
    for folder, names in choices:
        folders.setdefault(_listed(names), []).append(f"{folder}/")
    searched = " or ".join(
        f"{' or '.join(places)} with {names}" for names, places in folders.items()
    )
    partly = f" ({'; '.join(partial)})" if partial else ""
    raise InputError(
        f"dataset {dataset!r} was not found: searched {root} for {searched}{partly}; {get}"
        f" there, or name another folder with {WHERE}"
    )


def has_files(folder: Path, name: str) -> bool:
    """Return whether the folder holds this file or folder, packed or not."""
    return (folder / name).exists() or (folder / f"{name}.gz").is_file()


def resolve(dataset: str, root: Path | None, path: str) -> Path:
    """Return the path that a user wrote: absolute, below the data folder, or below the current
    folder, in this order.
    """
    if not path:
        raise InputError(f"dataset {dataset!r} needs a path: give it as {dataset}(path='...')")
    given = Path(path).expanduser()
    tried = [given] if given.is_absolute() or root is None else [root / given, given]
    for candidate in tried:
        if candidate.exists():
            return candidate
    raise InputError(
        f"no file or folder {path} for dataset {dataset!r}: searched"
        f" {' and '.join(map(str, tried))}; correct the path, or name the data folder with {WHERE}"
    )


def damaged_file(
    path: Path, expected: str, found: str, cure: str = "fetch the file again"
) -> InputError:
    """Return the error for a file with other content than expected."""
    return InputError(
        f"{path} is damaged or not the right file: expected {expected}, found {found}; {cure}"
    )


def _listed(names: Sequence[str]) -> str:
    return (
        ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"
    )
