"""Output folders and their locks, atomic writes, hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from remanence.core.errors import InputError, RunFailed
from remanence.core.safe_path import SafePath
from remanence.core.temporary_files import TEMPORARY, try_lock

LOCK = ".lock"
SWEPT_LEVELS = 4  # comparison/runs/NAME/checkpoints/client_states


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file that the user named completely or not at all."""
    (SafePath(path.parent) / path.name).write(content)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def translate_disk_errors(folder: Path, *, resumable: bool = False) -> Iterator[None]:
    """Raise an error of one sentence for a full or read-only disk; saved files stay valid.

    Args:
        folder: The folder that is written to.
        resumable: Whether it holds a run that `remanence resume` continues; otherwise the message
            says to repeat the command.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            go_on = f"remanence resume {folder}" if resumable else "repeat the command"
            raise RunFailed(
                f"the disk that holds {folder} is full: nothing saved so far is lost; free"
                f" some space, then {go_on}"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InputError(
                f"cannot write to {folder} ({error.strerror}): choose another folder"
            ) from error
        raise


_held_locks: list[IO[bytes]] = []  # lock files of this process


@contextmanager
def lock(folder: Path | SafePath) -> Iterator[None]:
    """Lock a folder for this process, and delete what killed ones did not finish writing there. The
    lock ends with the process, also when it is killed.
    """
    folder = SafePath.of(folder)
    with (folder / LOCK).append() as file:
        if not try_lock(file.fileno()):
            raise InputError(
                f"{folder} is in use by another remanence process: wait for it, or choose"
                " another --out"
            )
        _held_locks.append(file)
        try:
            folder.sweep(SWEPT_LEVELS)
            yield
        finally:
            _held_locks.remove(file)


def _release_locks() -> None:
    """Close the locks in a forked child: its copy of a lock would keep the folder locked after the
    parent has ended.
    """
    while _held_locks:
        _held_locks.pop().close()


os.register_at_fork(after_in_child=_release_locks)


def _holds_results(folder: Path) -> bool:
    """Whether a folder has files, apart from those that a killed process can have left behind
    before it wrote any result.
    """
    names = SafePath(folder).list_names()
    return any(name != LOCK and not TEMPORARY.fullmatch(name) for name in names)


def _file_in_the_way(folder: Path) -> Path | None:
    """The path itself or a parent, if it exists and is not a folder."""
    paths = (folder, *folder.parents)
    return next((path for path in paths if path.exists() and not path.is_dir()), None)


def make_folder(folder: Path) -> None:
    """Create a folder for output and its parents, unless they exist.

    Raises:
        InputError: A file stands in the way, or the disk cannot be written.
    """
    blocking = _file_in_the_way(folder)
    if blocking is not None:
        raise InputError(f"cannot write to {folder}: {blocking} is a file; choose another folder")
    with translate_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_output_dir(folder: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Check that `create_output_dir` can create a folder, without changing anything; arguments and
    errors are those of `create_output_dir`.
    """
    blocking = _file_in_the_way(folder)
    if blocking is not None:
        raise InputError(f"{blocking} is a file: --out names a folder")
    folder = folder.resolve()
    if not _holds_results(folder):
        return
    ours = any((folder / mark).exists() for mark in marks)
    if not overwrite:
        cure = (
            f"go on with remanence resume {folder}, start anew with --overwrite,"
            " or choose another --out"
            if ours
            else "choose another --out"
        )
        raise InputError(f"{folder} exists and is not empty: {cure}")
    if not ours:
        raise InputError(
            f"{folder} is not a run of ours, so --overwrite will not delete it: choose"
            " another --out"
        )


def create_output_dir(folder: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Create an output folder.

    Args:
        folder: The folder; it must be empty or not exist, unless `overwrite`.
        overwrite: Delete the folder first if it holds a run.
        marks: Names of files that show that a folder holds a run; no other folder is deleted.

    Raises:
        InputError: The folder cannot be used.
    """
    check_output_dir(folder, overwrite, marks)
    folder = folder.resolve()  # a link to a run stays a link to the new one
    if _holds_results(folder):
        with lock(folder):
            (SafePath(folder.parent) / folder.name).delete_folder()
    make_folder(folder)


def folder_name(text: str) -> str:
    """A name for a folder, made of letters, digits, dots and equals signs.

    >>> folder_name("fedprox(mu=0.1)+wsm")
    'fedprox-mu=0.1-wsm'
    """
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-.")[:120]
