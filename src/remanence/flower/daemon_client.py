"""Reaching a site's process that stays, and starting it where there is none. Imports nothing heavy.

They talk over a socket in a folder that only their user can enter. The process ends with the
SuperExec that started it, and so with the SuperNode.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from remanence.core.errors import InputError, RunFailed
from remanence.flower.settings import SiteFile
from remanence.flower.wire import WireMessage, from_bytes, to_bytes

# seconds a new process has until it listens: torch takes some to load, on a busy machine many
STARTING = 120.0
LOG = "worker.log"
_LENGTH = struct.Struct("<Q")


def call_worker(site: SiteFile, request: WireMessage) -> WireMessage:
    """Hand a message over and wait for the answer, however long it takes."""
    with contextlib.closing(reach_worker(site)) as line:
        send(line, to_bytes(request))
        content = receive(line)
    if content is None:
        raise RunFailed(
            f"the site's process ended in the middle of its work: its log is {site.state / LOG}"
        )
    return from_bytes(content)


def reach_worker(site: SiteFile) -> socket.socket:
    """A line to the site's process; one is started where nobody answers."""
    path, end, started = socket_path(site), time.monotonic() + STARTING, None
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(str(path))
            return line
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
        if started is None or started.poll() is not None:
            if started is not None and time.monotonic() > end - STARTING / 2:
                raise RunFailed(f"the site's process does not start: its log is {site.state / LOG}")
            started = start_worker(site)
        if time.monotonic() > end:
            raise RunFailed(
                f"the site's process did not start in {STARTING:g} s: its log is {site.state / LOG}"
            )
        time.sleep(0.1)


def start_worker(site: SiteFile) -> subprocess.Popen[bytes]:
    """In a session of its own, so that the end of this message does not end it."""
    site.make_state()
    command = [
        sys.executable,
        "-m",
        "remanence.flower.site_daemon",
        str(site.path),
        "--owner",
        str(os.getppid()),
    ]
    with (site.state / LOG).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def socket_path(site: SiteFile) -> Path:
    """The same for everybody who reads this site file; short, because a socket's path may have
    100 characters.
    """
    folder = Path(tempfile.gettempdir()) / f"remanence-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if (
        owner.st_uid != os.getuid()
        or not stat.S_ISDIR(owner.st_mode)
        or stat.S_IMODE(owner.st_mode) & 0o077
    ):
        raise InputError(
            f"{folder} is not a folder that this user alone can enter: remove it, or set"
            " TMPDIR to a folder of your own"
        )
    return folder / f"{hashlib.sha256(str(site.state).encode()).hexdigest()[:16]}.sock"


def send(line: socket.socket, content: bytes) -> None:
    line.sendall(_LENGTH.pack(len(content)))
    line.sendall(content)


def receive(line: socket.socket) -> bytes | None:
    """None where the other end is gone."""
    header = _read(line, _LENGTH.size)
    return None if header is None else _read(line, _LENGTH.unpack(header)[0])


def _read(line: socket.socket, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        try:
            piece = line.recv(min(1 << 20, count - len(content)))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        content += piece
    return bytes(content)
