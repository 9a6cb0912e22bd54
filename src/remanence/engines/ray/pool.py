"""The workers of the engine `ray`, some of which may die, hang or never start.

A free worker takes the next call. A worker that is lost is replaced, and its call is made again.
Nothing is lost with it: it has no state that a round needs, and a client's result does not depend
on which worker trains it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remanence.core.errors import RemanenceError, RunFailed, first_line

log = logging.getLogger("remanence")
POLL_S = 5.0  # timeouts are checked this often while no answer comes
# Seconds until a worker has started, whatever the timeout: a busy node imports torch slowly.
START_TIMEOUT_S = 300.0


class ActorRequest(NamedTuple):
    """A call: a method of a worker and its arguments."""

    method: str
    arguments: tuple[Any, ...]
    # the slot to prefer, modulo the size of the pool, so that related models are on one node
    affinity: int = 0


@dataclass
class PoolSlot:
    """A place of the pool, and the worker that fills it now."""

    number: int
    actor: Any
    starting: Any  # reference to its answer to `ready`; None after the answer has arrived
    since: float = field(default_factory=time.monotonic)


@dataclass
class PendingCall:
    """A call that a slot is working on."""

    slot: PoolSlot
    number: int
    since: float = field(default_factory=time.monotonic)


class ActorPool:
    """A fixed number of workers.

    Args:
        spawn: Starts a worker.
        count: How many.
        retries: How often a lost call is made again.
        timeout: Seconds for an answer; 0: any time.
    """

    def __init__(self, spawn: Callable[[], Any], count: int, retries: int, timeout: float):
        self.spawn, self.retries, self.timeout = spawn, retries, timeout
        self.losses: list[str] = []  # for the log and for tests
        self.failed_starts = 0  # in sequence
        self.slots = [self._spawn(number) for number in range(count)]

    def map_unordered(self, calls: Sequence[ActorRequest]) -> Iterator[tuple[int, Any]]:
        """Make all calls, the first ones first.

        Yields:
            The number of a call and its answer, in any order.
        """
        import ray

        waiting, tries = list(range(len(calls))), [0] * len(calls)
        pending: dict[Any, PendingCall] = {}
        while waiting or pending:
            busy = {call.slot.number for call in pending.values()}
            for slot in self.slots:
                if waiting and slot.starting is None and slot.number not in busy:
                    number = self._next(waiting, calls, slot)
                    waiting.remove(number)
                    pending[
                        getattr(slot.actor, calls[number].method).remote(*calls[number].arguments)
                    ] = PendingCall(slot, number)
            starting = {slot.starting: slot for slot in self.slots if slot.starting is not None}
            ready, _ = ray.wait([*pending, *starting], num_returns=1, timeout=POLL_S)
            for answer in ready:
                if answer in starting:
                    self._on_ready(starting[answer])
                    continue
                call = pending.pop(answer)
                try:
                    result = ray.get(answer)
                except ray.exceptions.RayTaskError as error:
                    raise _explain(error) from error
                except ray.exceptions.RayError as error:
                    waiting.insert(0, self._on_lost(call, tries, _first_line(error)))
                    continue
                yield call.number, result
            for answer, call in list(pending.items()):
                if self.timeout and time.monotonic() - call.since > self.timeout:
                    del pending[answer]
                    waiting.insert(
                        0,
                        self._on_lost(
                            call, tries, f"it did not answer in {self.timeout:g} s", hung=True
                        ),
                    )
            if not pending and waiting:
                self._give_up_waiting()

    def shutdown(self) -> None:
        """End all workers."""
        import ray

        # otherwise Ray would start a cluster
        for slot in self.slots if ray.is_initialized() else []:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                ray.kill(slot.actor)
        self.slots = []

    def _next(self, waiting: Sequence[int], calls: Sequence[ActorRequest], slot: PoolSlot) -> int:
        """The first call with an affinity to this slot; if there is none, the first call."""
        preferred = (
            number for number in waiting if calls[number].affinity % len(self.slots) == slot.number
        )
        return next(preferred, waiting[0])

    def _spawn(self, number: int) -> PoolSlot:
        actor = self.spawn()
        return PoolSlot(number, actor, actor.ready.remote())

    def _replace(self, slot: PoolSlot) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(slot.actor)  # it may hang and still run
        self.slots[self.slots.index(slot)] = self._spawn(slot.number)

    def _on_ready(self, slot: PoolSlot) -> None:
        import ray

        try:
            ray.get(slot.starting)
            slot.starting, self.failed_starts = None, 0
        except ray.exceptions.RayError as error:
            self.failed_starts += 1
            if self.failed_starts > self.retries:
                raise RunFailed(
                    f"Ray workers cannot be started ({_first_line(error)}): remanence must"
                    " be installed on every node, with the same Python and torch"
                ) from error
            self._log_once(
                f"Ray worker {slot.number} did not start ({_first_line(error)}): trying another"
            )
            self._replace(slot)

    def _on_lost(self, call: PendingCall, tries: list[int], reason: str, hung: bool = False) -> int:
        """Replace a worker that died or hangs.

        Returns:
            The number of the call to make again. One that hangs is made twice at most, so that
            nothing waits longer than two timeouts.
        """
        tries[call.number] += 1
        if tries[call.number] > (min(self.retries, 1) if hung else self.retries):
            raise RunFailed(
                f"the same work was lost {tries[call.number]} times with the Ray workers"
                f" that did it (the last: {reason}): nothing is lost,"
                " go on with remanence resume, with fewer workers if memory is short"
            )
        self._log_once(f"Ray worker {call.slot.number} was lost ({reason}): another does its work")
        self._replace(call.slot)
        return call.number

    def _give_up_waiting(self) -> None:
        """Fail where no worker has started for too long."""
        waited = time.monotonic() - max(slot.since for slot in self.slots)
        if (
            self.timeout
            and waited > max(self.timeout, START_TIMEOUT_S)
            and all(slot.starting is not None for slot in self.slots)
        ):
            raise RunFailed(
                f"no Ray worker could start in {waited:.0f} s: the cluster has no free"
                " core or GPU for one; nothing is lost, go on with remanence resume"
            )

    def _log_once(self, sentence: str) -> None:
        self.losses.append(sentence)
        log.warning(sentence)


# by settings: the pool, and how many engines use it
SHARED_POOLS: dict[Any, tuple[ActorPool, int]] = {}


def acquire_pool(config_key: Any, make: Callable[[], ActorPool]) -> ActorPool:
    """The pool that other engines of this process use with the same settings, or a new one."""
    pool, users = SHARED_POOLS[config_key] if config_key in SHARED_POOLS else (make(), 0)
    SHARED_POOLS[config_key] = (pool, users + 1)
    return pool


def release_pool(config_key: Any) -> None:
    """Stop using a pool; the last user shuts it down."""
    pool, users = SHARED_POOLS.pop(config_key)
    if users > 1:
        SHARED_POOLS[config_key] = (pool, users - 1)
    else:
        pool.shutdown()


def _explain(error: Any) -> RemanenceError:
    """An error inside a worker: our own as it is, any other with its source."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RemanenceError):
        return cause
    remedy = (
        ": install remanence, and the modules your model and parts come from, on every node"
        if isinstance(cause, ImportError)
        else ""
    )
    return RunFailed(f"a Ray worker failed{remedy}: {error}")


def _first_line(error: Exception) -> str:
    return first_line(error).rstrip(".:")
