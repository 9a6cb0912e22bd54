"""A site's process that stays between messages, with torch loaded and the data in memory.

    python -m remanence.flower.site_daemon /path/to/site.toml --owner PID

It answers one message after the other and ends when its owner, Flower's SuperExec, is gone. Nothing
is lost with it: what must be kept is on the disk before an answer leaves.
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

LOOK = 1.0  # seconds between two looks for the owner


def main() -> int:
    parser = argparse.ArgumentParser(description="a site's process that stays between messages")
    parser.add_argument("site", type=Path)
    parser.add_argument("--owner", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("remanence").setLevel(logging.INFO)
    threading.Thread(target=exit_with_parent, args=(given.owner,), daemon=True).start()
    try:
        serve(given.site)
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def exit_with_parent(owner: int) -> None:
    """End when the owner ends, even in the middle of a round: whoever asked is gone too."""
    while _alive(owner):
        time.sleep(LOOK)
    os._exit(0)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # where it can be seen: one that is dead and not yet buried is gone
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def serve(path: Path) -> None:
    """One at a time in a site's folder: a second process waits for the first one's end, as
    after a restart of the SuperNode.
    """
    file = read_site(path)
    with lock(file.make_state()):
        from remanence.flower.site import Site

        site, address = Site(file), socket_path(file)
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(address))
            door.listen()
            while True:
                line, _ = door.accept()
                with (
                    contextlib.closing(line),
                    contextlib.suppress(BrokenPipeError, ConnectionResetError, WireError),
                ):
                    content = receive(line)
                    if content is not None:
                        send(line, to_bytes(site.answer(from_bytes(content))))


if __name__ == "__main__":
    sys.exit(main())
