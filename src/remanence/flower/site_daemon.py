"""A site's process that keeps torch and the data in memory between messages.

    python -m remanence.flower.site_daemon /path/to/site.toml --owner PID

It handles one message after the other and ends when its owner, Flower's SuperExec, ends. Nothing is
lost with it: state is on the disk before a response is sent.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

from remanence.core.errors import RemanenceError
from remanence.core.files import lock
from remanence.flower.daemon_client import receive, send, socket_path
from remanence.flower.settings import read_site
from remanence.flower.wire import WireError, from_bytes, to_bytes

OWNER_POLL_S = 1.0  # seconds between two checks that the owner is alive


def main() -> int:
    parser = argparse.ArgumentParser(description="a site's process that stays between messages")
    parser.add_argument("site", type=Path)
    parser.add_argument("--owner", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("remanence").setLevel(logging.INFO)
    threading.Thread(target=exit_with_parent, args=(arguments.owner,), daemon=True).start()
    try:
        serve(arguments.site)
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def exit_with_parent(owner: int) -> None:
    """End this process when its owner ends, even in the middle of a round."""
    while _is_alive(owner):
        time.sleep(OWNER_POLL_S)
    os._exit(0)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # a zombie process (where /proc shows it) has ended
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def serve(path: Path) -> None:
    """Handle messages until the process ends. A second process in the same site's folder waits for
    the first one to end, as after a restart of the SuperNode.
    """
    file = read_site(path)
    with lock(file.make_state()):
        from remanence.flower.site import Site

        site, address = Site(file), socket_path(file)
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(address))
            server.listen()
            while True:
                connection, _ = server.accept()
                with (
                    contextlib.closing(connection),
                    contextlib.suppress(BrokenPipeError, ConnectionResetError, WireError),
                ):
                    content = receive(connection)
                    if content is not None:
                        send(connection, to_bytes(site.answer(from_bytes(content))))


if __name__ == "__main__":
    sys.exit(main())
