"""Links and special files that take the place of a file or folder."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

SECRET = b"not yours"


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "secret")


def link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "absent")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, outside: Path) -> None:
    # bound by a short relative name: the path of a socket has at most 100 characters
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


PLANTS: list[Callable[[Path, Path], None]] = [
    link_to_file,
    link_to_nothing,
    link_to_folder,
    link_to_device,
    link_to_itself,
    pipe,
    unix_socket,
    device,
]


def make_outside(folder: Path) -> Path:
    """A folder that links lead to, with a file in it."""
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    return folder


def assert_untouched(outside: Path) -> None:
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == SECRET
