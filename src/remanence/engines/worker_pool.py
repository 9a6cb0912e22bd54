"""The worker processes of the engine `processes`, and how work gets done although some of them die
or hang.

A worker that dies is replaced, and another does its work again: nothing it knew is missed, and a
client's result does not depend on who trained it. A worker that does not answer within `timeout`
real seconds is ended and replaced; work that hangs a second time is given up, so nobody waits
longer than twice that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from remanence.core.errors import RunFailed

log = logging.getLogger("remanence")
# of workers at the same piece of work before the run fails: the machine has too little memory for
# it
MAX_CRASHES = 3
MAX_TIMEOUTS = 2  # times the same work may hang
SHUTDOWN_S = 1.0  # seconds a worker has to end by itself

Serve = Callable[
    [Connection, list[Connection]], None
]  # a worker's life: (its end of the pipe, the parent's ends it inherited and must close)


@dataclass
class WorkerProcess:
    """A worker, as its parent sees it."""

    pipe: Connection
    child: Any  # multiprocessing's Process
    seen_broadcast: int = -1  # the last errand whose preface it has heard


@dataclass
class Pending:
    """What a worker is busy with."""

    worker: WorkerProcess
    number: int
    since: float


class WorkerPool:
    """`count` workers that live as `serve` says. timeout: real seconds; 0: they are waited for
    without end.
    """

    def __init__(self, serve: Serve, count: int, timeout: float):
        self.serve, self.timeout, self.errands = serve, timeout, 0
        self.context = multiprocessing.get_context("fork")
        self.members: list[WorkerProcess] = []
        self.losses: list[str] = []  # what happened, for the log and for tests
        for _ in range(count):
            self.members.append(self._start())

    def map_unordered(
        self, order: Sequence[int], ask: Callable[[int], Any], preface: Any = None
    ) -> Iterator[tuple[int, Any]]:
        """Have questions answered by whoever is free, in this order. -> (number, answer) as they
        come; None: its worker hung, and hung again

        ask: makes the message of a question, each time it is asked; preface: what a worker must
            hear before its first question.
        """
        self.errands += 1
        waiting, deaths, hangs = list(order)[::-1], dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        busy: dict[Connection, Pending] = {}
        while waiting or busy:
            for fork in self.members:
                if waiting and fork.pipe not in busy:
                    number = waiting.pop()
                    busy[fork.pipe] = Pending(fork, number, time.monotonic())
                    self._ask(fork, ask(number), preface)
            for pipe in multiprocessing.connection.wait(list(busy), self._patience(busy)):
                question = busy.pop(cast(Connection, pipe))
                try:
                    kind, answer = question.worker.pipe.recv()
                except (EOFError, OSError):
                    deaths[question.number] += 1
                    waiting.append(self._replace(question, "it died", deaths[question.number]))
                    continue
                if kind == "failed":
                    raise RunFailed(f"a worker process failed: {answer}")
                yield question.number, answer
            for question in [late for late in busy.values() if self._is_overdue(late)]:
                del busy[question.worker.pipe]
                hangs[question.number] += 1
                number = self._replace(question, f"it did not answer in {self.timeout:g} s", 0)
                if hangs[number] < MAX_TIMEOUTS:
                    waiting.append(number)
                else:
                    yield number, None

    def close(self) -> None:
        """End all workers, also those that hang."""
        for fork in self.members:
            fork.pipe.close()
            fork.child.terminate()
        for fork in self.members:
            _stop(fork)
        self.members = []

    def _start(self) -> WorkerProcess:
        mine, theirs = self.context.Pipe()
        inherited = [*(fork.pipe for fork in self.members), mine]
        child = self.context.Process(
            target=_worker_main, args=(self.serve, theirs, inherited), daemon=True
        )
        with _termination_held():
            child.start()
        theirs.close()
        return WorkerProcess(mine, child)

    def _ask(self, fork: WorkerProcess, message: Any, preface: Any) -> None:
        try:
            if preface is not None and fork.seen_broadcast != self.errands:
                fork.pipe.send(preface)
                fork.seen_broadcast = self.errands
            fork.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead, which waiting for its answer will show

    def _patience(self, busy: dict[Connection, Pending]) -> float | None:
        """Seconds until somebody is overdue."""
        if not self.timeout:
            return None
        return max(
            0.0, min(question.since for question in busy.values()) + self.timeout - time.monotonic()
        )

    def _is_overdue(self, question: Pending) -> bool:
        return bool(self.timeout) and time.monotonic() - question.since >= self.timeout

    def _replace(self, question: Pending, reason: str, deaths: int) -> int:
        """Somebody new for a worker that is dead or hangs. -> the question it left open"""
        if deaths >= MAX_CRASHES:
            raise RunFailed(
                f"the same work was lost {deaths} times with the worker process that did"
                " it (out of memory, or killed): nothing is lost,"
                " go on with remanence resume, with fewer workers if it happens again"
            )
        place = self.members.index(question.worker)
        question.worker.pipe.close()
        question.worker.child.kill()
        question.worker.child.join()
        del self.members[place]
        self.members.insert(place, self._start())
        sentence = f"worker process {place} was lost ({reason}): another does its work"
        self.losses.append(sentence)
        log.warning(sentence)
        return question.number


def _stop(fork: WorkerProcess) -> None:
    fork.child.join(SHUTDOWN_S)
    if fork.child.is_alive():  # stopped, or deaf to SIGTERM
        fork.child.kill()
        fork.child.join()


def _worker_main(serve: Serve, pipe: Connection, inherited: list[Connection]) -> None:
    """A worker's life, which SIGTERM simply ends: what its parent wanted to do then (Ray, say,
    would end its cluster) is not for a worker to do.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    serve(pipe, inherited)


@contextlib.contextmanager
def _termination_held() -> Iterator[None]:
    """SIGTERM waits, in this thread and in what is forked meanwhile, which has the parent's
    handlers until it puts its own in their place.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
