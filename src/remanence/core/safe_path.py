"""Paths inside a folder that may come from another person: runs, comparisons, sites' states.

A run folder that a stranger sent may contain links, named pipes and devices. Opened by its path,
`metrics.jsonl` could then be a file anywhere on the disk. `SafePath` opens every folder below the
first one relative to the descriptor of its parent, never through a link, and opens regular files
only.

The first folder is the one that the user named. It may be reached through links: a folder of
results is often a link to a larger disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from remanence.core.errors import InputError, UnsafeFile
from remanence.core.temporary_files import (
    INSIDE,
    OPEN_FOLDER,
    TEMPORARY,
    delete_unless_locked,
    make_file,
    make_folder,
    make_temporary,
    status_of,
)

FILE, FOLDER = "a regular file", "a folder"
KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: FOLDER,
    stat.S_IFREG: FILE,
}
FLUSHED_AT_ONCE = 8  # files, each by a thread
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError)  # the second where the root is a file


@dataclass(frozen=True)
class SafePath:
    """A file or folder in a folder that may come from another person.

    `SafePath(folder) / "checkpoints" / "manifest.json"` joins names as `pathlib.Path` does. It is
    not a path that `open` accepts: read, write and delete with its methods. They raise `UnsafeFile`
    for a link, a special file, and a folder in place of a file or the reverse, and `OSError` as
    `open` does.

    Args:
        root: The folder that the user named.
        names: Of the folders below it, and of the file.
    """

    root: Path
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path | SafePath) -> SafePath:
        """A folder that the user named, or one that is inside another."""
        return folder if isinstance(folder, SafePath) else cls(folder)

    @classmethod
    def of_file(cls, path: Path | SafePath) -> SafePath:
        """A file that the user named, or one that is inside another folder."""
        return path if isinstance(path, SafePath) else cls(path.parent) / path.name

    def __truediv__(self, name: str) -> SafePath:
        if name in ("", ".", "..") or any(sign in name for sign in ("/", os.sep, "\0")):
            raise InputError(f"{name!r:.80} is not the name of a file in {self}")
        return SafePath(self.root, (*self.names, name))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The same as a plain path, for messages."""
        return self.root.joinpath(*self.names)

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else self.root.name

    @property
    def parent(self) -> SafePath:
        """The folder that holds it; not defined for the root."""
        return SafePath(self.root, self.names[:-1])

    def is_regular_file(self) -> bool:
        """Whether there is a regular file; False where there is nothing."""
        return self.status(FILE) is not None

    def is_folder(self) -> bool:
        """Whether there is a folder; False where there is nothing."""
        return self.status(FOLDER) is not None

    def status(self, expected: str = FILE) -> os.stat_result | None:
        """Size and times; None where there is nothing."""
        with suppress(*_NOTHING_THERE), self._open_parent() as parent:
            if not self.names:
                return os.fstat(parent)
            return self._check(status_of(self.name, parent), expected)
        return None

    def list_names(self) -> list[str]:
        """The names in a folder, sorted; none where there is no folder."""
        with suppress(*_NOTHING_THERE), self._open_folder() as folder:
            return sorted(os.listdir(folder))
        return []

    def list_files(self) -> dict[str, os.stat_result]:
        """The sizes and times of the regular files in a folder, by name, sorted."""
        return self._list(stat.S_ISREG)

    def list_folders(self) -> list[str]:
        """The names of the folders in a folder, sorted, without links to folders."""
        return list(self._list(stat.S_ISDIR))

    def _list(self, of_kind: Callable[[int], bool]) -> dict[str, os.stat_result]:
        with suppress(*_NOTHING_THERE), self._open_folder() as folder:
            found = {name: status_of(name, folder) for name in sorted(os.listdir(folder))}
            return {
                name: status
                for name, status in found.items()
                if status is not None and of_kind(status.st_mode)
            }
        return {}

    def reader(self) -> IO[bytes]:
        """Open a file for reading."""
        return os.fdopen(self._open(os.O_RDONLY), "rb")

    def read(self, limit: int | None = None) -> bytes:
        """The content of a file, as long as the file is when it is opened.

        Args:
            limit: The most bytes to return; None: all.
        """
        with self.reader() as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(size if limit is None else min(size, limit))

    def append(self) -> IO[bytes]:
        """Open a file for writing at its end; it is created where there is none."""
        return os.fdopen(self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def open_at(self, length: int) -> IO[bytes]:
        """Open a file for writing after its first `length` bytes; everything beyond is cut off."""
        file = os.fdopen(self._open(os.O_RDWR | os.O_CREAT), "r+b")
        file.truncate(length)
        file.seek(length)
        return file

    def write(self, content: bytes) -> None:
        """Replace a file completely or not at all: temporary file, flush to disk, rename, flush
        the folder.
        """
        with self._open_parent() as parent:
            self._check(status_of(self.name, parent), FILE)
            _replace_files(parent, {self.name: content})

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        """Replace files of this folder as `write` does, and flush all of them together."""
        with self._open_folder() as folder:
            for name in contents:
                (self / name)._check(status_of(name, folder), FILE)
            _replace_files(folder, contents)

    def write_folder(self, contents: Mapping[str, bytes]) -> None:
        """Write a folder of files that appears complete or not at all, in place of an older one."""
        with self._open_parent() as parent:
            name, descriptor = make_temporary(parent, make_folder)
            try:
                for file_name in contents:
                    with os.fdopen(make_file(file_name, descriptor), "wb") as file:
                        file.write(contents[file_name])
                        flush(file)
                os.fsync(descriptor)
                self.delete_folder()
                os.replace(name, self.name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
                raise
            finally:
                os.close(descriptor)
            os.fsync(parent)

    def make_folder(self) -> None:
        """Create a folder and its parents, unless they exist."""
        if not self.names:
            self.root.mkdir(parents=True, exist_ok=True)
            return
        self.parent.make_folder()
        with self._open_parent() as parent:
            with suppress(FileExistsError):
                os.mkdir(self.name, dir_fd=parent)
            self._check(status_of(self.name, parent), FOLDER)

    def delete(self) -> None:
        """Delete a file, if there is one."""
        with suppress(*_NOTHING_THERE), self._open_parent() as parent:
            self._check(status_of(self.name, parent), FILE)
            os.unlink(self.name, dir_fd=parent)

    def delete_folder(self) -> None:
        """Delete a folder, if there is one, with all that is in it; links in it are deleted, not
        followed.
        """
        with suppress(*_NOTHING_THERE), self._open_parent() as parent:
            self._check(status_of(self.name, parent), FOLDER)
            try:
                shutil.rmtree(self.name, dir_fd=parent)
            except RecursionError:
                raise InputError(
                    f"{self} has too many folders inside each other: delete it by hand"
                ) from None

    def sweep(self, levels: int = 0) -> None:
        """Delete what killed processes did not finish writing; what a living process writes is
        locked, and stays.

        Args:
            levels: Of folders below this one that are swept, too.
        """
        with suppress(*_NOTHING_THERE), self._open_folder() as folder:
            for name in os.listdir(folder):
                status = status_of(name, folder)
                if TEMPORARY.fullmatch(name):
                    delete_unless_locked(name, folder)
                elif levels and status is not None and stat.S_ISDIR(status.st_mode):
                    (self / name).sweep(levels - 1)

    @contextmanager
    def _open_parent(self) -> Iterator[int]:
        """The descriptor of the folder that holds it; of the root for the root itself."""
        descriptor = os.open(self.root, OPEN_FOLDER)  # the user named it: links are followed
        try:
            inside = SafePath(self.root)
            for name in self.names[:-1]:
                inside = inside / name
                child = inside._open_in(descriptor, OPEN_FOLDER, FOLDER)
                os.close(descriptor)
                descriptor = child
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _open_folder(self) -> Iterator[int]:
        """The descriptor of a folder."""
        with self._open_parent() as parent:
            if not self.names:
                yield parent
                return
            descriptor = self._open_in(parent, OPEN_FOLDER, FOLDER)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _open(self, flags: int) -> int:
        """The descriptor of a file; one that is written must have no other name."""
        with self._open_parent() as parent:
            return self._open_in(parent, flags, FILE)

    def _open_in(self, parent: int, flags: int, expected: str) -> int:
        # checked before it is opened, which has effects for some devices, and again after it
        self._check(status_of(self.name, parent), expected, flags)
        try:
            descriptor = os.open(self.name, flags | INSIDE, 0o666, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                raise self._refuse("a link or a special file", expected) from None
            raise
        try:
            self._check(os.fstat(descriptor), expected, flags)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(
        self, status: os.stat_result | None, expected: str, flags: int = os.O_RDONLY
    ) -> os.stat_result | None:
        """Refuse another kind of file than the expected one."""
        if status is None:
            return None
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        if kind != expected:
            raise self._refuse(kind, expected)
        if expected == FILE and flags & os.O_ACCMODE != os.O_RDONLY and status.st_nlink > 1:
            raise UnsafeFile(
                f"{self} has {status.st_nlink} names (hard links), and writing would change the"
                " file under all of them: replace it by a copy"
            )
        return status

    def _refuse(self, kind: str, expected: str) -> UnsafeFile:
        return UnsafeFile(
            f"{self} is {kind} where {expected} belongs, and is neither opened nor changed: replace"
            " it by what belongs there, or delete it"
        )


def flush(*files: IO[bytes]) -> None:
    """Write what was written to files to the disk. A disk flushes several files at once in little
    more time than one.
    """
    for file in files:
        file.flush()
    if len(files) == 1:
        os.fsync(files[0].fileno())
    else:
        with ThreadPoolExecutor(FLUSHED_AT_ONCE) as pool:
            list(pool.map(os.fsync, [file.fileno() for file in files]))


def _replace_files(folder: int, contents: Mapping[str, bytes]) -> None:
    """Replace files of a folder, each completely or not at all: temporary files, flush to disk,
    rename, flush the folder.
    """
    temporary: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            files = []
            for name, content in contents.items():
                temporary[name], descriptor = make_temporary(folder, make_file)
                files.append(stack.enter_context(os.fdopen(descriptor, "wb")))
                files[-1].write(content)
            flush(*files)
            for name, made in temporary.items():
                os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        for made in temporary.values():
            with suppress(FileNotFoundError):
                os.unlink(made, dir_fd=folder)
        raise
    os.fsync(folder)
