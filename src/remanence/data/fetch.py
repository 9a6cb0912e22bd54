"""`remanence data fetch NAME`: download a dataset, check its hashes, unpack it, and move it into
the data folder by one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, RunFailed, unknown
from remanence.core.files import flush_folder, translate_disk_errors
from remanence.core.memory import size_of
from remanence.data.downloads import BY_HAND, COMES_WITH, DOWNLOADS, USER_DATA, Download
from remanence.data.http_download import Report, download

UNPACKED = 16 << 30  # bytes an archive may unpack to


def fetch(
    name: str,
    root: Path | None,
    *,
    everything: bool = False,
    report: Report | None = None,
    downloads: Sequence[Download] | None = None,
) -> Path:
    """Fetch a dataset into the data folder; files that exist are not downloaded again.

    Args:
        name: a key of `DOWNLOADS`.
        root: the data folder.
        everything: also fetch optional files (the third file of SVHN).
        report: called with file name, bytes received and bytes in all.
        downloads: the files; default: those of `DOWNLOADS`.

    Returns:
        The folder in which the reader finds the dataset.
    """
    if downloads is None:
        downloads = _downloads_of(name)
    if root is None:
        raise InputError(
            f"no data folder is set for {name}: name one with --data-dir or REMANENCE_DATA"
        )
    root = Path(root).expanduser()
    if root.exists() and not root.is_dir():
        raise InputError(f"{root} is a file: the data folder is a folder")
    with translate_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for item in downloads:
            if everything or not item.optional:
                _fetch_download(item, root, report or (lambda name, done, total: None))
    return root / downloads[0].into


@contextmanager
def show_progress(quiet: bool = False) -> Iterator[Report]:
    """Show progress on standard error: a bar for each file in a terminal, otherwise a line for each
    tenth; nothing if `quiet`.
    """
    if quiet or not sys.stderr.isatty():
        shown: dict[str, int] = {}

        def print_tenths(name: str, done: int, total: int | None) -> None:
            tenth = 10 * done // total if total else 0
            if not quiet and tenth != shown.get(name):
                shown[name] = tenth
                print(
                    f"{name}: {size_of(done)}{f' of {size_of(total)}' if total else ''}",
                    file=sys.stderr,
                    flush=True,
                )

        yield print_tenths
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def update_bar(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield update_bar


def _downloads_of(name: str) -> Sequence[Download]:
    """Return the files of a dataset, or raise the reason why it cannot be fetched."""
    if name in DOWNLOADS:
        return DOWNLOADS[name]
    if name in BY_HAND:
        raise InputError(f"{name} cannot be fetched from one address: {BY_HAND[name]}")
    if name in COMES_WITH:
        raise InputError(f"{name} needs no files: use it with --data {name}")
    if name in USER_DATA:
        raise InputError(
            f"{name} reads your own files, and there is no publisher to fetch them from:"
            f" give a path, such as {name}(path='...')"
        )
    raise unknown("data to fetch", name, [*DOWNLOADS, *BY_HAND])


def _fetch_download(item: Download, root: Path, report: Report) -> None:
    """Download, check and unpack one file, unless it exists."""
    folder = root / item.into
    final = folder / (item.holds or item.name)
    if final.exists():
        return
    if item.holds and folder.exists() and any(path.is_dir() for path in folder.iterdir()):
        raise InputError(
            f"{folder} is incomplete and has folders that unpacking would overwrite: move"
            " it away, then fetch again"
        )
    part = root / f".{item.into.replace('/', '-')}-{item.name}.part"
    download(item.url, part, report)
    found = _md5(part)
    if found != item.md5:
        part.unlink()
        raise RunFailed(
            f"{item.url} has the MD5 sum {found} instead of {item.md5}, so it was"
            " deleted: the publisher may have changed the file, or the transfer damaged it; try"
            " again, or fetch it by hand"
        )
    if item.holds:
        _unpack(part, item, folder)
        part.unlink()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(part, final)
        flush_folder(folder)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, item: Download, folder: Path) -> None:
    """Unpack into a temporary folder and rename it, so that no reader finds half a dataset."""
    beside = Path(tempfile.mkdtemp(prefix=".unpack-", dir=archive.parent))
    try:
        try:
            if zipfile.is_zipfile(archive):
                _unpack_zip(archive, beside)
            else:
                _unpack_tar(archive, beside)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise RunFailed(
                f"{item.url} could not be unpacked ({error}): remove {archive} and fetch it again"
            ) from None
        found = next(
            (
                path
                for path in [beside / item.holds, *sorted(beside.rglob(item.holds))]
                if path.exists()
            ),
            None,
        )
        if found is None:
            raise RunFailed(
                f"{item.url} does not hold {item.holds}: the publisher has changed it;"
                " fetch and unpack it by hand"
            )
        if folder.exists():
            for path in sorted(found.parent.iterdir()):
                os.replace(path, folder / path.name)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(found.parent, folder)
            if found.parent == beside:
                folder.chmod(0o755)  # mkdtemp makes folders private
        flush_folder(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _unpack_tar(archive: Path, beside: Path) -> None:
    with tarfile.open(archive) as packed:
        total = 0
        for member in packed:
            total += member.size
            if total > UNPACKED:
                raise tarfile.TarError(f"it unpacks to more than {size_of(UNPACKED)}")
            # filter="data" rejects links, devices and paths outside the folder
            packed.extract(member, beside, filter="data")


def _unpack_zip(archive: Path, beside: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        if sum(member.file_size for member in packed.infolist()) > UNPACKED:
            raise zipfile.BadZipFile(f"it unpacks to more than {size_of(UNPACKED)}")
        packed.extractall(beside)  # extractall removes drives and ..
