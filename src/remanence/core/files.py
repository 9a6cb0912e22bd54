"""Output folders and their locks, atomic writes, hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from remanence.core.errors import InputError, RunFailed
from remanence.core.safe_path import SafePath
from remanence.core.temporary_files import TEMPORARY, try_lock

LOCK = ".lock"
PIECE = 1 << 20  # bytes of a file that are hashed at once
SWEPT_LEVELS = 4  # comparison/runs/NAME/checkpoints/client_states


def write_atomically(path: Path | SafePath, content: bytes) -> None:
    """Replace a file that the user named completely or not at all, and delete what killed processes
    did not finish writing beside it.
    """
    file = SafePath.of_file(path)
    file.parent.sweep()
    file.write(content)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, eq=False)
class FilePrefix:
    """The beginning of an append-only file: what belongs to a state of a run.

    Args:
        length: In bytes.
        hash: SHA-256 of these bytes. It is not updated; a copy goes on with the bytes after them.
    """

    length: int
    hash: hashlib._Hash

    @property
    def sha256(self) -> str:
        return self.hash.hexdigest()

    @classmethod
    def read(cls, file: SafePath, length: int) -> FilePrefix:
        """Hash the first `length` bytes of a file, or all where it has fewer."""
        digest, left = hashlib.sha256(), length
        with file.reader() as opened:
            while left and (content := opened.read(min(left, PIECE))):
                digest.update(content)
                left -= len(content)
        return cls(length - left, digest)


@contextmanager
def translate_disk_errors(folder: Path | SafePath, *, resumable: bool = False) -> Iterator[None]:
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


def _holds_results(folder: SafePath) -> bool:
    """Whether a folder has files, apart from those that a killed process can have left behind
    before it wrote any result.
    """
    return any(name != LOCK and not TEMPORARY.fullmatch(name) for name in folder.list_names())


def _file_in_the_way(folder: Path) -> Path | None:
    """The path itself or a parent, if it exists and is not a folder."""
    paths = (folder, *folder.parents)
    return next((path for path in paths if path.exists() and not path.is_dir()), None)


def check_no_file(path: Path, usage: str) -> None:
    """Refuse a file in place of a folder that the user named, or of one of its parents.

    Args:
        path: The folder.
        usage: What names a folder, for the message.
    """
    blocking = _file_in_the_way(path)
    if blocking is not None:
        raise InputError(f"{blocking} is a file: {usage}")


def make_folder(folder: Path | SafePath) -> None:
    """Create a folder for output and its parents, unless they exist.

    Raises:
        InputError: A file stands in the way, or the disk cannot be written.
    """
    folder = SafePath.of(folder)
    blocking = _file_in_the_way(folder.root)
    if blocking is not None:
        raise InputError(f"cannot write to {folder}: {blocking} is a file; choose another folder")
    with translate_disk_errors(folder):
        folder.make_folder()


def _output_dir(folder: Path | SafePath) -> SafePath:
    """A folder for output, by its own name: a link that the user named stays a link to the new
    one.
    """
    return folder if isinstance(folder, SafePath) else SafePath.of_file(folder.resolve())


def check_output_dir(folder: Path | SafePath, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Check that `create_output_dir` can create a folder, without changing anything; arguments and
    errors are those of `create_output_dir`.
    """
    check_no_file(SafePath.of(folder).root, "--out names a folder")
    place = _output_dir(folder)
    if not _holds_results(place):
        return
    ours = any((place / mark).is_regular_file() for mark in marks)
    if not overwrite:
        raise InputError(
            f"{place} holds an earlier run: finish it with remanence resume {place} (--rounds"
            " extends a finished one), start anew with --overwrite, or choose another --out"
            if ours
            else f"{place} exists and is not empty: choose another --out"
        )
    if not ours:
        raise InputError(
            f"{place} is not a run of ours, so --overwrite will not delete it: choose another --out"
        )


def create_output_dir(folder: Path | SafePath, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Create an output folder.

    Args:
        folder: The folder; it must be empty or not exist, unless `overwrite`.
        overwrite: Delete the folder first if it holds a run.
        marks: Names of files that show that a folder holds a run; no other folder is deleted.

    Raises:
        InputError: The folder cannot be used.
    """
    check_output_dir(folder, overwrite, marks)
    place = _output_dir(folder)
    if _holds_results(place):
        with lock(place):
            place.delete_folder()
    make_folder(place)


def folder_name(text: str) -> str:
    """A name for a folder, made of letters, digits, dots and equals signs.

    >>> folder_name("fedprox(mu=0.1)+wsm")
    'fedprox-mu=0.1-wsm'
    """
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-.")[:120]
