"""The connection to a Ray cluster, which runs already or is started here: one for all engines of a
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remanence.core.errors import InputError, first_line
from remanence.engines.processes import count_cores

CONNECT_TIMEOUT = 10.0  # seconds for a cluster to answer


def connect(address: str, workers: int) -> None:
    """Connect to the cluster, or start one here. Every caller calls `disconnect` in the end.

    Args:
        address: Of a running cluster; empty: the environment variable RAY_ADDRESS, and without it a
            cluster on this machine alone. Tokens and certificates are settings of Ray
            (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_USE_TLS).
        workers: The least number of cores of a cluster that is started here.
    """
    import ray

    if not ray.is_initialized():
        with _keep_sigterm_handler():
            _open(address or os.environ.get("RAY_ADDRESS", ""), workers)
        _connection.owned = True
    _connection.users += 1


def disconnect() -> None:
    """Disconnect after the last user, unless the process was connected before.

    A cluster that was started here ends.
    """
    import ray

    _connection.users -= 1
    if not _connection.users and _connection.owned:
        _connection.owned = False
        with _keep_sigterm_handler():
            ray.shutdown()


@dataclass
class Connection:
    """This process's connection to a cluster."""

    users: int = 0
    owned: bool = False


_connection = Connection()


def _open(address: str, workers: int) -> None:
    import ray

    # no telemetry, unless the user turned it on
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        ray.init(
            address="local",
            num_cpus=max(workers, count_cores()),
            include_dashboard=False,
            **quiet,
        )
        return
    try:
        _check_reachable(address)
        ray.init(address=address, **quiet)
    # the last: a wrong token, or none
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise InputError(
            f"no Ray cluster can be used at {address} ({first_line(error)}): check the address, the"
            " token (RAY_AUTH_TOKEN) and that Ray and Python are the same"
            " versions there, or leave the address out to start one here"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing answers; Ray itself waits for half a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():  # "auto" is for Ray to find
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()


def count_resources(name: str) -> float:
    """How many CPUs or GPUs the cluster has, busy or not."""
    import ray

    partly_typed: Any = ray
    return float(partly_typed.cluster_resources().get(name, 0))


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore our handler of SIGTERM, which saves the run; Ray sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
