"""The other processes of pfl's distributed simulation. They have to be started before pfl is
imported, which looks for them at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys


def start_followers() -> list[subprocess.Popen[str]]:
    """The other processes of pfl's own distributed simulation, which find each other by two
    variables of the environment.
    """
    workers = int(os.environ.get("PEER_WORKERS", "1"))
    if workers == 1 or "PFL_WORKER_RANK" in os.environ:
        return []
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        addresses = ",".join(f"127.0.0.1:{free.getsockname()[1]}" for free in sockets)
    os.environ |= {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": "0"}
    return [
        subprocess.Popen(
            [sys.executable, sys.argv[0], sys.argv[1], f"{sys.argv[2]}-{rank}"],
            env=os.environ | {"PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1, workers)
    ]
