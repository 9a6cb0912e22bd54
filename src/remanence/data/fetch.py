"""`remanence data fetch NAME`: files from their publisher, resumed by ranges, checked by hash,
put in place whole or not at all.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, RunFailed, unknown
from remanence.core.files import flush_folder, translate_disk_errors
from remanence.data.downloads import BY_HAND, COMES_WITH, DOWNLOADS, USER_DATA, Download
from remanence.data.files import size_of

PIECE = 1 << 20
LIMIT = 4 << 30  # bytes of one file; the largest published one has 1.2 GiB
UNPACKED = 16 << 30  # bytes an archive may unpack to
TRIES = 5  # after a broken line
PAUSE = 1.0  # seconds before the second try, doubled each time
TIMEOUT = 60.0  # seconds without a byte

# file name, bytes there, bytes in all where the publisher says
Report = Callable[[str, int, int | None], None]


def fetch(
    name: str,
    root: Path | None,
    *,
    everything: bool = False,
    tell: Report | None = None,
    parcels: Sequence[Download] | None = None,
) -> Path:
    """Fetch a dataset into the data folder. -> the folder in which the reader will find it

    everything: also the optional files (SVHN's third). Files that are already there are left alone.
    """
    if parcels is None:
        parcels = _downloads_of(name)
    if root is None:
        raise InputError(
            f"no data folder is set, so {name} has nowhere to go: name one with --data-dir or"
            " REMANENCE_DATA"
        )
    root = Path(root).expanduser()
    if root.exists() and not root.is_dir():
        raise InputError(f"{root} is a file: the data folder is a folder")
    with translate_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for parcel in parcels:
            if everything or not parcel.optional:
                _fetch_download(parcel, root, tell or (lambda name, done, total: None))
    return root / parcels[0].into


@contextmanager
def show_progress(quiet: bool = False) -> Iterator[Report]:
    """A bar for each file in a terminal, a line each tenth elsewhere, nothing where quiet was
    asked for; all on standard error.
    """
    if quiet or not sys.stderr.isatty():
        shown: dict[str, int] = {}

        def tell(name: str, done: int, total: int | None) -> None:
            tenth = 10 * done // total if total else 0
            if not quiet and tenth != shown.get(name):
                shown[name] = tenth
                print(
                    f"{name}: {size_of(done)}{f' of {size_of(total)}' if total else ''}",
                    file=sys.stderr,
                    flush=True,
                )

        yield tell
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

        def draw(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield draw


def _downloads_of(name: str) -> Sequence[Download]:
    if name in DOWNLOADS:
        return DOWNLOADS[name]
    if name in BY_HAND:
        raise InputError(f"{name} cannot be fetched from one address: {BY_HAND[name]}")
    if name in COMES_WITH:
        raise InputError(f"{name} needs no files: use it at once, with --data {name}")
    if name in USER_DATA:
        raise InputError(
            f"{name} reads your own files, and there is no publisher to fetch them from:"
            f" give a path, such as {name}(path='...')"
        )
    raise unknown("data to fetch", name, [*DOWNLOADS, *BY_HAND])


def _fetch_download(parcel: Download, root: Path, tell: Report) -> None:
    folder = root / parcel.into
    final = folder / (parcel.holds or parcel.name)
    if final.exists():
        return
    if parcel.holds and folder.exists() and any(path.is_dir() for path in folder.iterdir()):
        raise InputError(
            f"{folder} is there in part and has folders that unpacking would overwrite: move"
            " it away, then fetch again"
        )
    part = root / f".{parcel.into.replace('/', '-')}-{parcel.name}.part"
    download(parcel.url, part, tell)
    found = _md5(part)
    if found != parcel.md5:
        part.unlink()
        raise RunFailed(
            f"{parcel.url} came with the MD5 sum {found} instead of {parcel.md5}, so it"
            " was thrown away:"
            " the publisher may have changed the file, or something on the way did; try"
            " again, or fetch it by hand"
        )
    if parcel.holds:
        _unpack(part, parcel, folder)
        part.unlink()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(part, final)
        flush_folder(folder)


def download(url: str, part: Path, tell: Report) -> None:
    """All bytes of an address in a file; what an earlier attempt left there is kept and the
    rest asked for. A broken line is tried again.
    """
    if not url.startswith(("https://", "http://")):
        raise InputError(f"{url} is not a web address: it begins with https:// or http://")
    tries, pause = TRIES, PAUSE
    while True:
        before = _size(part)
        try:
            if _ask(url, part, tell):
                return
            problem = f"the line broke after {size_of(_size(part))}"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise RunFailed(
                    f"{url} answers {error.code} {error.reason}: the publisher has moved the"
                    " file; fetch it by hand"
                ) from None
            problem = f"the publisher's machine answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error) or type(error).__name__
        if _size(part) > before:  # it moves on, so patience begins anew
            tries, pause = TRIES, PAUSE
        tries -= 1
        if not tries:
            raise RunFailed(
                f"cannot fetch {url} ({problem}): check the line; what has come is kept,"
                " and the same command goes on from there"
            )
        time.sleep(pause)
        pause *= 2


def _ask(url: str, part: Path, tell: Report) -> bool:
    """One request for what is missing. -> is the file complete?"""
    have = _size(part)
    request = urllib.request.Request(
        url, headers={"User-Agent": "remanence", "Accept-Encoding": "identity"}
    )
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        total = error.headers.get("Content-Range", "").rpartition("/")[2]
        error.close()
        if total == str(have):
            return True  # all bytes were there already
        part.unlink()  # longer than what the publisher has now: another file
        return False
    with answer:
        if have and answer.status != 206:  # this publisher knows no ranges: from the beginning
            have = 0
        elif have and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException(
                f"asked for bytes from {have} on, got {answer.headers.get('Content-Range')}"
            )
        length = answer.headers.get("Content-Length")
        total_bytes = have + int(length) if length and length.isdecimal() else None
        if (total_bytes or 0) > LIMIT:
            raise InputError(
                f"{url} has {size_of(total_bytes or 0)}, more than any file we know of: fetch"
                " it by hand if you trust it"
            )
        with part.open("ab" if have else "wb") as file:
            while piece := answer.read(PIECE):
                file.write(piece)
                have += len(piece)
                if have > LIMIT:
                    raise InputError(
                        f"{url} sends more than {size_of(LIMIT)}: fetch it by hand if you trust it"
                    )
                tell(part.name.removeprefix(".").removesuffix(".part"), have, total_bytes)
    return total_bytes is None or have >= total_bytes


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, parcel: Download, folder: Path) -> None:
    """Into a folder beside the target, then in place by one rename, so that nobody ever reads
    half of it.
    """
    beside = Path(tempfile.mkdtemp(prefix=".unpack-", dir=archive.parent))
    try:
        try:
            if zipfile.is_zipfile(archive):
                _unpack_zip(archive, beside)
            else:
                _unpack_tar(archive, beside)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise RunFailed(
                f"{parcel.url} could not be unpacked ({error}): remove {archive} and fetch it again"
            ) from None
        found = next(
            (
                path
                for path in [beside / parcel.holds, *sorted(beside.rglob(parcel.holds))]
                if path.exists()
            ),
            None,
        )
        if found is None:
            raise RunFailed(
                f"{parcel.url} does not hold {parcel.holds}: the publisher has changed it;"
                " fetch and unpack it by hand"
            )
        if folder.exists():
            for path in sorted(found.parent.iterdir()):
                os.replace(path, folder / path.name)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(found.parent, folder)
            if found.parent == beside:
                folder.chmod(0o755)  # a temporary folder is its maker's alone
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
            # refuses links, devices and paths that lead elsewhere
            packed.extract(member, beside, filter="data")


def _unpack_zip(archive: Path, beside: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        if sum(member.file_size for member in packed.infolist()) > UNPACKED:
            raise zipfile.BadZipFile(f"it unpacks to more than {size_of(UNPACKED)}")
        packed.extractall(beside)  # leaves out drives and .. by itself
