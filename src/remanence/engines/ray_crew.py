"""The workers of the engine `ray`: how a cluster is found, and how work gets done although workers die, hang or never start.

Work is handed to whoever is free. A worker that is lost is replaced, and what it was doing is done again by another: nothing it knew is missed, and a
client's result does not depend on who trained it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remanence.engines.processes import count_cores
from remanence.errors import InputError, RemanenceError, RunFailed

log = logging.getLogger("remanence")
KNOCKING = 10.0  # seconds a cluster has to answer at all
PATIENCE = 5.0  # seconds between two looks at the clock while nothing comes back


def require_ray() -> None:
    """Refuse before any work where the package is missing."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise InputError(f'engine ray needs the package ray ({error}): pip install "remanence[ray]"') from error


def connect(address: str, workers: int) -> bool:
    """Find the cluster, or start one here. -> whether the connection is ours to close

    address: of a running cluster; empty: the environment variable RAY_ADDRESS, and without it a cluster on this machine alone. Tokens and certificates are
        Ray's own settings (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_USE_TLS) and read by it.
    """
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry from us, unless somebody asked for it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS", "")
    with _keep_termination():
        if not address:
            ray.init(address="local", num_cpus=max(workers, count_cores()), include_dashboard=False, **quietly)
            return True
        try:
            _knock(address)
            ray.init(address=address, **quietly)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"no Ray cluster can be used at {address} ({reason}): check the address, the token (RAY_AUTH_TOKEN) and that Ray and Python are the same"
                " versions there, or leave the address out to start one here"
            ) from error
    return True


def _knock(address: str) -> None:
    """Is anybody there? Ray itself asks for half a minute before it says no."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():  # "auto" is for Ray to find
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCKING).close()


def count_resources(name: str) -> int:
    """How many CPU or GPU the cluster has, busy or not."""
    import ray

    partly_typed: Any = ray
    return int(partly_typed.cluster_resources().get(name, 0))


def disconnect() -> None:
    """Leave the cluster; one that we started ends with this."""
    import ray

    with _keep_termination():
        ray.shutdown()


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


class Call(NamedTuple):
    """One piece of work: a method of a worker and what it is called with."""

    method: str
    arguments: tuple[Any, ...]


@dataclass
class Member:
    """A worker's place in the crew, whoever fills it."""

    number: int
    actor: Any
    starting: Any  # the answer that says it is ready; None once it came
    since: float = field(default_factory=time.monotonic)


@dataclass
class Errand:
    """A call that a member is working on."""

    member: Member
    call: int
    since: float = field(default_factory=time.monotonic)


class Crew:
    """`count` workers, made by `hire`; a call is tried again `retries` times and given up on after `timeout` seconds each (0: never)."""

    def __init__(self, hire: Callable[[], Any], count: int, retries: int, timeout: float):
        self.hire, self.retries, self.timeout = hire, retries, timeout
        self.losses: list[str] = []  # what happened, for the log and for tests
        self.failed_starts = 0  # one after the other
        self.members = [self._take_on(number) for number in range(count)]

    def carry(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Have all calls done, the first ones first. -> (number of the call, its answer), in any order"""
        import ray

        waiting, tries = list(range(len(calls)))[::-1], [0] * len(calls)
        errands: dict[Any, Errand] = {}
        while waiting or errands:
            busy = {errand.member.number for errand in errands.values()}
            for member in self.members:
                if waiting and member.starting is None and member.number not in busy:
                    number = waiting.pop()
                    errands[getattr(member.actor, calls[number].method).remote(*calls[number].arguments)] = Errand(member, number)
            starting = {member.starting: member for member in self.members if member.starting is not None}
            ready, _ = ray.wait([*errands, *starting], num_returns=1, timeout=PATIENCE)
            for answer in ready:
                if answer in starting:
                    self._welcome(starting[answer])
                    continue
                errand = errands.pop(answer)
                try:
                    result = ray.get(answer)
                except ray.exceptions.RayTaskError as error:
                    raise _explain(error) from error
                except ray.exceptions.RayError as error:
                    waiting.append(self._lose(errand, tries, _first_line(error)))
                    continue
                yield errand.call, result
            for answer, errand in list(errands.items()):
                if self.timeout and time.monotonic() - errand.since > self.timeout:
                    del errands[answer]
                    waiting.append(self._lose(errand, tries, f"it did not answer in {self.timeout:g} s"))
            if not errands and waiting:
                self._give_up_waiting()

    def dismiss(self) -> None:
        """End all workers."""
        import ray

        for member in self.members:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                ray.kill(member.actor)
        self.members = []

    def _take_on(self, number: int) -> Member:
        actor = self.hire()
        return Member(number, actor, actor.ready.remote())

    def _replace(self, member: Member) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(member.actor)  # it may hang rather than be dead
        self.members[self.members.index(member)] = self._take_on(member.number)

    def _welcome(self, member: Member) -> None:
        import ray

        try:
            ray.get(member.starting)
            member.starting, self.failed_starts = None, 0
        except ray.exceptions.RayError as error:
            self.failed_starts += 1
            if self.failed_starts > self.retries:
                raise RunFailed(
                    f"Ray workers cannot be started ({_first_line(error)}): remanence, and the modules your model and parts come from, must be installed"
                    " on every node, and a worker needs memory for the data"
                ) from error
            self._tell(f"Ray worker {member.number} did not start ({_first_line(error)}): trying another")
            self._replace(member)

    def _lose(self, errand: Errand, tries: list[int], reason: str) -> int:
        """Replace a worker that died or hangs. -> the call to do again"""
        tries[errand.call] += 1
        if tries[errand.call] > self.retries:
            raise RunFailed(
                f"the same work was lost {tries[errand.call]} times with the Ray workers that did it (the last: {reason}): nothing is lost,"
                " go on with remanence resume, with fewer workers if memory is short"
            )
        self._tell(f"Ray worker {errand.member.number} was lost ({reason}): another does its work")
        self._replace(errand.member)
        return errand.call

    def _give_up_waiting(self) -> None:
        """Nobody works, and nobody has started for too long."""
        waited = time.monotonic() - max(member.since for member in self.members)
        if self.timeout and waited > self.timeout and all(member.starting is not None for member in self.members):
            raise RunFailed(
                f"no Ray worker could start in {waited:.0f} s: the cluster has no free core or GPU for one; nothing is lost, go on with remanence resume"
            )

    def _tell(self, sentence: str) -> None:
        self.losses.append(sentence)
        log.warning(sentence)


def _explain(error: Any) -> RemanenceError:
    """A worker's own error: a sentence of ours as it is, anything else with where it came from."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RemanenceError) else RunFailed(f"a Ray worker failed: {error}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
