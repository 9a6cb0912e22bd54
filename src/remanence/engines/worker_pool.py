"""The worker processes of the engine `processes`, some of which may die or hang.

A worker that dies is replaced, and its work is done again. Nothing is lost: a worker has no state
that a round needs, and a client's result does not depend on which worker trains it. A worker that
does not answer within `timeout` seconds is replaced as well. Work that hangs twice is given up, so
that nothing waits longer than twice the timeout.
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

from remanence.core.errors import RunFailed, first_line
from remanence.core.preparation import announce

log = logging.getLogger("remanence")
# Workers that may die at the same work before the run fails: the machine has too little memory.
MAX_CRASHES = 3
MAX_TIMEOUTS = 2  # times the same work may hang
SHUTDOWN_S = 1.0  # seconds a worker has to end by itself

# What a worker runs: (its end of the pipe, the parent's ends it inherited and must close)
Serve = Callable[[Connection, list[Connection]], None]


@dataclass
class WorkerProcess:
    """A worker process, and what its parent stores about it."""

    pipe: Connection
    process: Any  # multiprocessing's Process
    last_broadcast: int = -1  # the number of the last broadcast it received


@dataclass
class Pending:
    """A request that a worker has not answered."""

    worker: WorkerProcess
    number: int
    since: float


class WorkerPool:
    """A fixed number of workers.

    Args:
        serve: What a worker runs.
        count: How many workers.
        timeout: Seconds for an answer; 0: any time.
    """

    def __init__(self, serve: Serve, count: int, timeout: float):
        self.serve, self.timeout, self.broadcasts = serve, timeout, 0
        self.context = multiprocessing.get_context("fork")
        self.workers: list[WorkerProcess] = []
        self.losses: list[str] = []  # for the log and for tests
        try:
            for _ in range(count):
                self.workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def map_unordered(
        self, order: Sequence[int], make_request: Callable[[int], Any], broadcast: Any = None
    ) -> Iterator[tuple[int, Any]]:
        """Send requests to free workers, in this order.

        Args:
            order: Numbers of requests.
            make_request: Makes the message of a request, each time it is sent.
            broadcast: A message that every worker receives before its first request.

        Yields:
            The number of a request and its answer, as they come; None: it hung twice.
        """
        self.broadcasts += 1
        waiting = list(order)[::-1]
        crashes, timeouts = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        busy: dict[Connection, Pending] = {}
        while waiting or busy:
            for worker in self.workers:
                if waiting and worker.pipe not in busy:
                    number = waiting.pop()
                    busy[worker.pipe] = Pending(worker, number, time.monotonic())
                    self._send(worker, make_request(number), broadcast)
            for pipe in multiprocessing.connection.wait(list(busy), self._time_left(busy)):
                pending = busy.pop(cast(Connection, pipe))
                try:
                    kind, answer = pending.worker.pipe.recv()
                except (EOFError, OSError):
                    crashes[pending.number] += 1
                    waiting.append(self._replace(pending, "it died", crashes[pending.number]))
                    continue
                if kind == "preparing":
                    announce(answer)
                    busy[pending.worker.pipe] = pending
                    continue
                if kind == "failed":
                    raise RunFailed(f"a worker process failed: {answer}")
                yield pending.number, answer
            for pending in [late for late in busy.values() if self._is_overdue(late)]:
                del busy[pending.worker.pipe]
                timeouts[pending.number] += 1
                number = self._replace(pending, f"it did not answer in {self.timeout:g} s", 0)
                if timeouts[number] < MAX_TIMEOUTS:
                    waiting.append(number)
                else:
                    yield number, None

    def close(self) -> None:
        """End all workers, also those that hang."""
        for worker in self.workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self.workers:
            _stop(worker)
        self.workers = []

    def _start(self) -> WorkerProcess:
        parent_end, worker_end = self.context.Pipe()
        inherited = [*(worker.pipe for worker in self.workers), parent_end]
        process = self.context.Process(
            target=_worker_main, args=(self.serve, worker_end, inherited), daemon=True
        )
        try:
            with _sigterm_blocked():
                process.start()
        except OSError as error:  # too many processes, or too little memory for another one
            raise RunFailed(
                f"worker process {len(self.workers)} could not be started ({first_line(error)}):"
                " use fewer workers"
            ) from error
        worker_end.close()
        return WorkerProcess(parent_end, process)

    def _send(self, worker: WorkerProcess, message: Any, broadcast: Any) -> None:
        try:
            if broadcast is not None and worker.last_broadcast != self.broadcasts:
                worker.pipe.send(broadcast)
                worker.last_broadcast = self.broadcasts
            worker.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is dead; `map_unordered` finds that when it waits for the answer

    def _time_left(self, busy: dict[Connection, Pending]) -> float | None:
        """Seconds until the first answer is overdue."""
        if not self.timeout:
            return None
        first = min(pending.since for pending in busy.values())
        return max(0.0, first + self.timeout - time.monotonic())

    def _is_overdue(self, pending: Pending) -> bool:
        return bool(self.timeout) and time.monotonic() - pending.since >= self.timeout

    def _replace(self, pending: Pending, reason: str, crashes: int) -> int:
        """Launch a new worker in place of one that died or hangs. -> the request it left open"""
        if crashes >= MAX_CRASHES:
            raise RunFailed(
                f"the same work was lost {crashes} times with the worker process that did"
                " it (out of memory, or killed): nothing is lost,"
                " go on with remanence resume, with fewer workers if it happens again"
            )
        place = self.workers.index(pending.worker)
        pending.worker.pipe.close()
        pending.worker.process.kill()
        pending.worker.process.join()
        del self.workers[place]
        self.workers.insert(place, self._start())
        sentence = f"worker process {place} was lost ({reason}): another does its work"
        self.losses.append(sentence)
        log.warning(sentence)
        return pending.number


def _stop(worker: WorkerProcess) -> None:
    worker.process.join(SHUTDOWN_S)
    if worker.process.is_alive():  # suspended, or it ignores SIGTERM
        worker.process.kill()
        worker.process.join()


def _worker_main(serve: Serve, pipe: Connection, inherited: list[Connection]) -> None:
    """Run a worker that SIGTERM ends.

    The parent's handler is removed: it saves the run, or ends the parent's Ray cluster.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    serve(pipe, inherited)


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread, and in a process forked meanwhile.

    The new process has the parent's handlers until it sets its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
