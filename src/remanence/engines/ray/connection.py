"""The cluster of the engine `ray`: found by its address or started here, one connection for all
engines of a process, and left as it was found.
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

from remanence.core.errors import InputError
from remanence.engines.processes import count_cores

CONNECT_TIMEOUT = 10.0  # seconds a cluster has to answer at all


def connect(address: str, workers: int) -> None:
    """Find the cluster, or start one here; once for all who ask, each of whom calls `disconnect` in
    the end.

    address: of a running cluster; empty: the environment variable RAY_ADDRESS, and without it a
        cluster on this machine alone. Tokens and certificates are Ray's own settings
        (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_USE_TLS) and read by it.
    """
    import ray

    if not ray.is_initialized():
        with _keep_termination():
            _open(address or os.environ.get("RAY_ADDRESS", ""), workers)
        _connection.ours = True
    _connection.users += 1


def disconnect() -> None:
    """The last one out leaves the cluster, if it was us who joined it; one that we started ends
    with this.
    """
    import ray

    _connection.users -= 1
    if not _connection.users and _connection.ours:
        _connection.ours = False
        with _keep_termination():
            ray.shutdown()


@dataclass
class Connection:
    """Of this process to a cluster: Ray has one for all."""

    users: int = 0
    ours: bool = False


_connection = Connection()


def _open(address: str, workers: int) -> None:
    import ray

    # no telemetry from us, unless somebody asked for it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        ray.init(
            address="local",
            num_cpus=max(workers, count_cores()),
            include_dashboard=False,
            **quietly,
        )
        return
    try:
        _knock(address)
        ray.init(address=address, **quietly)
    # the last: a wrong token, or none
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"no Ray cluster can be used at {address} ({reason}): check the address, the"
            " token (RAY_AUTH_TOKEN) and that Ray and Python are the same"
            " versions there, or leave the address out to start one here"
        ) from error


def _knock(address: str) -> None:
    """Is anybody there? Ray itself asks for half a minute before it says no."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():  # "auto" is for Ray to find
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()


def count_resources(name: str) -> float:
    """How many CPU or GPU the cluster has, busy or not."""
    import ray

    partly_typed: Any = ray
    return float(partly_typed.cluster_resources().get(name, 0))


@contextlib.contextmanager
def _keep_termination() -> Iterator[None]:
    """Ray puts a handler of its own for SIGTERM in place of ours, which saves the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
