"""Temporary files and folders: what a write makes before it has its name. A killed process leaves
them; they are known by their names, and swept.

All functions take the descriptor of the folder and a name in it, and never follow a link.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress

try:
    import fcntl
except ImportError:
    raise ImportError("remanence needs Linux or macOS; on Windows it runs in WSL") from None

# The length does not depend on the final name, which may be as long as a name can be.
TEMPORARY = re.compile(r"\.remanence-[0-9a-f]{16}\.tmp")
# O_NONBLOCK: opening a pipe that took the place of a file after it was checked does not wait
INSIDE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def status_of(name: str, folder: int) -> os.stat_result | None:
    """Kind, size and times, of a link itself; None where there is nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def make_file(name: str, folder: int) -> int:
    """The descriptor of a new file."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | INSIDE, 0o666, dir_fd=folder)


def make_folder(name: str, folder: int) -> int:
    """The descriptor of a new folder."""
    os.mkdir(name, dir_fd=folder)
    return os.open(name, OPEN_FOLDER | INSIDE, dir_fd=folder)


def make_temporary(folder: int, make: Callable[[str, int], int]) -> tuple[str, int]:
    """Make a temporary file or folder, locked as long as its descriptor is open.

    Args:
        folder: The descriptor of the folder it is in.
        make: `make_file` or `make_folder`.

    Returns:
        Its name and its descriptor.
    """
    while True:
        name = f".remanence-{secrets.token_hex(8)}.tmp"
        descriptor = make(name, folder)
        with suppress(OSError):  # some network disks have no locks; nothing is swept there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        status = status_of(name, folder)
        if status is not None and os.path.samestat(status, os.fstat(descriptor)):
            return name, descriptor
        os.close(descriptor)  # another process swept it before it was locked


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder; False where another process has locked it, and on a disk
    without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file, and wait while another process has locked it; OSError on a disk without
    locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def delete_unless_locked(name: str, folder: int) -> None:
    """Delete a temporary file or folder, unless a living process is writing it."""
    status = status_of(name, folder)
    if status is None or stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        return  # a link or special file with such a name is not ours
    is_folder = stat.S_ISDIR(status.st_mode)
    with suppress(FileNotFoundError):  # finished in between
        flags = OPEN_FOLDER if is_folder else os.O_RDWR
        descriptor = os.open(name, flags | INSIDE, dir_fd=folder)
        try:
            if try_lock(descriptor):
                shutil.rmtree(name, dir_fd=folder) if is_folder else os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)
