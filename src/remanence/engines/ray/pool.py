"""The workers of the engine `ray`, and how work gets done although some of them die, hang or never
start.

Work is handed to whoever is free. A worker that is lost is replaced, and what it was doing is done
again by another: nothing it knew is missed, and a client's result does not depend on who trained
it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remanence.core.errors import RemanenceError, RunFailed

log = logging.getLogger("remanence")
PATIENCE = 5.0  # seconds between two looks at the clock while nothing comes back
# seconds that all workers together may take to start, however short an answer has to be: a busy
# node imports torch slowly
STARTING = 300.0


class ActorRequest(NamedTuple):
    """One piece of work: a method of a worker and what it is called with."""

    method: str
    arguments: tuple[Any, ...]
    affinity: int = (
        # whose place it had better be, counted round the crew: what belongs together then lies
        # together, if nobody has to wait for it
        0
    )


@dataclass
class PoolSlot:
    """A worker's place in the crew, whoever fills it."""

    number: int
    actor: Any
    starting: Any  # the answer that says it is ready; None once it came
    since: float = field(default_factory=time.monotonic)


@dataclass
class PendingCall:
    """A call that a member is working on."""

    member: PoolSlot
    call: int
    since: float = field(default_factory=time.monotonic)


class ActorPool:
    """`count` workers, made by `hire`; a call is tried again `retries` times and given up on
    after `timeout` seconds each (0: never).
    """

    def __init__(self, hire: Callable[[], Any], count: int, retries: int, timeout: float):
        self.hire, self.retries, self.timeout = hire, retries, timeout
        self.losses: list[str] = []  # what happened, for the log and for tests
        self.failed_starts = 0  # one after the other
        self.members = [self._spawn(number) for number in range(count)]

    def map_unordered(self, calls: Sequence[ActorRequest]) -> Iterator[tuple[int, Any]]:
        """Have all calls done, the first ones first. -> (number of the call, its answer), in
        any order
        """
        import ray

        waiting, tries = list(range(len(calls))), [0] * len(calls)
        errands: dict[Any, PendingCall] = {}
        while waiting or errands:
            busy = {errand.member.number for errand in errands.values()}
            for member in self.members:
                if waiting and member.starting is None and member.number not in busy:
                    number = self._next(waiting, calls, member)
                    waiting.remove(number)
                    errands[
                        getattr(member.actor, calls[number].method).remote(*calls[number].arguments)
                    ] = PendingCall(member, number)
            starting = {
                member.starting: member for member in self.members if member.starting is not None
            }
            ready, _ = ray.wait([*errands, *starting], num_returns=1, timeout=PATIENCE)
            for answer in ready:
                if answer in starting:
                    self._on_ready(starting[answer])
                    continue
                errand = errands.pop(answer)
                try:
                    result = ray.get(answer)
                except ray.exceptions.RayTaskError as error:
                    raise _explain(error) from error
                except ray.exceptions.RayError as error:
                    waiting.insert(0, self._on_lost(errand, tries, _first_line(error)))
                    continue
                yield errand.call, result
            for answer, errand in list(errands.items()):
                if self.timeout and time.monotonic() - errand.since > self.timeout:
                    del errands[answer]
                    waiting.insert(
                        0,
                        self._on_lost(
                            errand, tries, f"it did not answer in {self.timeout:g} s", hung=True
                        ),
                    )
            if not errands and waiting:
                self._give_up_waiting()

    def shutdown(self) -> None:
        """End all workers."""
        import ray

        # else it would start a cluster to find nobody
        for member in self.members if ray.is_initialized() else []:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                ray.kill(member.actor)
        self.members = []

    def _next(self, waiting: Sequence[int], calls: Sequence[ActorRequest], member: PoolSlot) -> int:
        """The first call that likes this member; where there is none, the first of all: nobody
        stands idle.
        """
        liked = (
            number
            for number in waiting
            if calls[number].affinity % len(self.members) == member.number
        )
        return next(liked, waiting[0])

    def _spawn(self, number: int) -> PoolSlot:
        actor = self.hire()
        return PoolSlot(number, actor, actor.ready.remote())

    def _replace(self, member: PoolSlot) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(member.actor)  # it may hang rather than be dead
        self.members[self.members.index(member)] = self._spawn(member.number)

    def _on_ready(self, member: PoolSlot) -> None:
        import ray

        try:
            ray.get(member.starting)
            member.starting, self.failed_starts = None, 0
        except ray.exceptions.RayError as error:
            self.failed_starts += 1
            if self.failed_starts > self.retries:
                raise RunFailed(
                    f"Ray workers cannot be started ({_first_line(error)}): remanence must"
                    " be installed on every node, with the same Python and torch"
                ) from error
            self._log_once(
                f"Ray worker {member.number} did not start ({_first_line(error)}): trying another"
            )
            self._replace(member)

    def _on_lost(
        self, errand: PendingCall, tries: list[int], reason: str, hung: bool = False
    ) -> int:
        """Replace a worker that died or hangs. -> the call to do again; what hangs is tried
        twice at most, so nobody waits longer than two timeouts
        """
        tries[errand.call] += 1
        if tries[errand.call] > (min(self.retries, 1) if hung else self.retries):
            raise RunFailed(
                f"the same work was lost {tries[errand.call]} times with the Ray workers"
                f" that did it (the last: {reason}): nothing is lost,"
                " go on with remanence resume, with fewer workers if memory is short"
            )
        self._log_once(
            f"Ray worker {errand.member.number} was lost ({reason}): another does its work"
        )
        self._replace(errand.member)
        return errand.call

    def _give_up_waiting(self) -> None:
        """Nobody works, and nobody has started for too long."""
        waited = time.monotonic() - max(member.since for member in self.members)
        if (
            self.timeout
            and waited > max(self.timeout, STARTING)
            and all(member.starting is not None for member in self.members)
        ):
            raise RunFailed(
                f"no Ray worker could start in {waited:.0f} s: the cluster has no free"
                " core or GPU for one; nothing is lost, go on with remanence resume"
            )

    def _log_once(self, sentence: str) -> None:
        self.losses.append(sentence)
        log.warning(sentence)


# by what they are like: the crew, and how many engines use it
SHARED_POOLS: dict[Any, tuple[ActorPool, int]] = {}


def acquire_pool(config_key: Any, make: Callable[[], ActorPool]) -> ActorPool:
    """The crew that other engines of this process use already, if it is of the same kind, or a
    new one.
    """
    crew, users = SHARED_POOLS[config_key] if config_key in SHARED_POOLS else (make(), 0)
    SHARED_POOLS[config_key] = (crew, users + 1)
    return crew


def release_pool(config_key: Any) -> None:
    """The last one out ends the workers."""
    crew, users = SHARED_POOLS.pop(config_key)
    if users > 1:
        SHARED_POOLS[config_key] = (crew, users - 1)
    else:
        crew.shutdown()


def _explain(error: Any) -> RemanenceError:
    """A worker's own error: a sentence of ours as it is, anything else with where it came from."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RemanenceError):
        return cause
    cure = (
        ": install remanence, and the modules your model and parts come from, on every node"
        if isinstance(cause, ImportError)
        else ""
    )
    return RunFailed(f"a Ray worker failed{cure}: {error}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
