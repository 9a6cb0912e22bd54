"""Connects to a site's daemon, and starts it if there is none. Imports nothing heavy.

Both use a Unix socket in a folder that only their user can enter. The daemon ends with the
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
from remanence.core.safe_path import SafePath
from remanence.flower.settings import SiteFile
from remanence.flower.wire import WireMessage, from_bytes, to_bytes

START_TIMEOUT_S = 120.0  # until a new daemon listens; importing torch is slow on a busy machine
LOG = "worker.log"
_LENGTH = struct.Struct("<Q")


def call_daemon(site: SiteFile, request: WireMessage) -> WireMessage:
    """Send a message to the daemon and wait for the response, without a timeout."""
    with contextlib.closing(connect(site)) as connection:
        send(connection, to_bytes(request))
        content = receive(connection)
    if content is None:
        raise RunFailed(f"the site's daemon ended during its work: see its log {site.state / LOG}")
    return from_bytes(content)


def connect(site: SiteFile) -> socket.socket:
    """A connection to the site's daemon, which is started if it does not run."""
    path, end, process = socket_path(site), time.monotonic() + START_TIMEOUT_S, None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if process is None or process.poll() is not None:
            if process is not None and time.monotonic() > end - START_TIMEOUT_S / 2:
                raise RunFailed(f"the site's daemon does not start: see its log {site.state / LOG}")
            process = start_daemon(site)
        if time.monotonic() > end:
            raise RunFailed(
                f"the site's daemon did not start in {START_TIMEOUT_S:g} s: see its log"
                f" {site.state / LOG}"
            )
        time.sleep(0.1)


def start_daemon(site: SiteFile) -> subprocess.Popen[bytes]:
    """Launch the daemon in a session of its own, so that it continues after this process ends."""
    site.make_state()
    command = [
        sys.executable,
        "-m",
        "remanence.flower.site_daemon",
        str(site.path),
        "--owner",
        str(os.getppid()),
    ]
    with (SafePath(site.state) / LOG).append() as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def socket_path(site: SiteFile) -> Path:
    """The path of the daemon's socket; short, because such a path has at most 100 characters."""
    folder = Path(tempfile.gettempdir()) / f"remanence-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if (
        status.st_uid != os.getuid()
        or not stat.S_ISDIR(status.st_mode)
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise InputError(
            f"{folder} is not a folder that this user alone can enter: remove it, or set"
            " TMPDIR to a folder of your own"
        )
    return folder / f"{hashlib.sha256(str(site.state).encode()).hexdigest()[:16]}.sock"


def send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> bytes | None:
    """One message; None if the other end has closed the connection."""
    header = _read(connection, _LENGTH.size)
    return None if header is None else _read(connection, _LENGTH.unpack(header)[0])


def _read(connection: socket.socket, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        try:
            piece = connection.recv(min(1 << 20, count - len(content)))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        content += piece
    return bytes(content)
