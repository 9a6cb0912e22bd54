"""`engine = "auto"`: try the engines that can run this task for a moment, and take the fastest."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import InputError
from remanence.core.slots import Phase
from remanence.engines.client_plan import expected_steps
from remanence.engines.processes import count_cores
from remanence.engines.sequential import SequentialEngine
from remanence.engines.stack_checks import needs_padding
from remanence.engines.table import make_engine
from remanence.engines.vectorized import MAX_STACK, VectorizedEngine
from remanence.training.task import TrainingTask

# most clients that a worker process trains together: more fall out of its cache
STACK_OF_WORKER = 16
FAST_STEP_S = 0.005  # seconds of one step below which one thread is enough
SLOW_STEP_S = (
    0.25  # seconds of one step from which on a CPU computes for real: stacking cannot pay there
)
STEPS = 3  # steps a client makes in a trial
CLIENTS = 16  # clients in a trial
LONGER_STEPS = 8  # steps in a trial of ways to run them
STEPS_OF_A_STACK = ("eager", "captured", "compiled")
TRACING_PAYS = 60.0  # seconds a run must take before it is worth a few to write its steps down
COMPILING_PAYS = 600.0  # the same for compiling them, which takes a minute or so
# and where one step is heavy: such networks are deep, and a ResNet-18 compiles for four minutes
COMPILING_HEAVY_PAYS = 3600.0
# times as slow as the fastest, and still as good: then the way that was tried first is taken, which
# is the simplest
TIE = 1.05
# times as slow as the best: writing steps down or compiling them does not make up for that
MAX_SLOWDOWN = 2.0

EngineKey = TypeVar("EngineKey")


class EngineChoice(NamedTuple):
    """Which engine, with how many threads, why in a sentence, how steps are run, and how many
    clients are trained together (0: left to the engine).
    """

    name: str
    threads: int
    reason: str
    execution: str = "auto"
    stack: int = 0


class Candidate(NamedTuple):
    """An engine for a CPU and how it runs; processes with a stack of 1 train one client after
    the other.
    """

    name: str
    stack: int = 0
    execution: str = "eager"

    def __str__(self) -> str:
        words = (
            self.name,
            "in stacks" if self.name == "processes" and self.stack > 1 else "",
            self.execution if self.execution != "eager" else "",
        )
        return " ".join(word for word in words if word)


def choose_engine(
    task: TrainingTask,
    work: ClientWork,
    stack: int = 0,
    workers: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = 0,
) -> EngineChoice:
    """Measure on the work's own clients; leaves torch with the number of threads it chose.
    `rounds` says whether compiling can pay.
    """
    padded, threads = task.model.depends_on_batch and needs_padding(task), torch.get_num_threads()
    if task.info.device.type == "cuda":
        if padded:
            return EngineChoice(
                "sequential",
                threads,
                "sequential: batch norm with clients of different sizes cannot be stacked",
            )
        try:
            return choose_steps(task, work, stack or MAX_STACK["cuda"], rounds, threads, clock)
        except InputError as error:  # a model that torch cannot map over a stack
            return EngineChoice("sequential", threads, f"sequential: {error}")
    trial = replace(task, phases=(Phase(steps=1),))
    first = _min_time(2, SequentialEngine(trial), _subset(work, 1), clock)
    # threads that wait for each other cost small nets more than they gain
    if threads > 1 and first < FAST_STEP_S:
        torch.set_num_threads(1)
        threads = 1
    cores, forks = workers or count_cores(), "fork" in multiprocessing.get_all_start_methods()
    can_fork = cores > 1 and len(work.clients) > 1 and forks
    length = rounds * int(expected_steps(task, work).sum())  # local steps of the whole run
    if first > SLOW_STEP_S:
        trials = Timings(task, _subset(work, cores), workers, clock)  # one client a worker
        return choose_for_slow_steps(
            trials,
            Candidate("processes", 1) if can_fork else Candidate("sequential"),
            first,
            length if forks else 0,
            threads,
        )
    some = _subset(work, CLIENTS)
    # never as a stack then: its steps may be as fast, but looking at rows is not
    by_workers = can_fork and task.model.has_convolutions
    stackable = not padded and len(some.clients) > 1 and not by_workers
    trials = Timings(task, some, workers, clock)
    trials.run(Candidate("sequential"), STEPS)
    if stackable:
        trials.run(Candidate("vectorized", stack or MAX_STACK["cpu"]), STEPS)
    if by_workers:
        trials.run(Candidate("processes", 1), STEPS)
    if length * trials.fastest > TRACING_PAYS:
        if can_fork and stackable and len(work.clients) >= 2 * cores:
            trials.run(
                Candidate("processes", min(stack or STACK_OF_WORKER, STACK_OF_WORKER)), STEPS
            )
        trials.refine(length)
    why = "; batch norm with clients of different sizes cannot be stacked" if padded else ""
    best = trials.best
    reason = f"{best}: milliseconds a local step of one client: {trials}{why}{trials.failure}"
    together = best.stack if best.name == "processes" else stack
    return EngineChoice(
        best.name,
        threads,
        reason,
        "auto" if best.execution == "eager" else best.execution,
        together,
    )


def choose_for_slow_steps(
    trials: Timings, plain: Candidate, first: float, length: int, threads: int
) -> EngineChoice:
    """Where one step takes seconds: plainly, or compiled, which saves products, if the run is
    long enough; tried for one step, since more take minutes.
    """
    best, measured = plain, ""
    if length * first > COMPILING_HEAVY_PAYS:
        trials.run(plain, 1)
        if length * trials.fastest > COMPILING_HEAVY_PAYS:
            trials.run(Candidate("processes", 1, "compiled"), 1)
        best, measured = (
            trials.best,
            f"; milliseconds a local step of one client: {trials}{trials.failure}",
        )
    reason = (
        f"{best}: one step takes {first:.2f} s, so the arithmetic decides and stacking cannot"
        f" pay{measured}"
    )
    return EngineChoice(
        best.name,
        threads,
        reason,
        "auto" if best.execution == "eager" else best.execution,
        best.stack,
    )


class Timings:
    """What was measured of a task on a CPU."""

    def __init__(
        self, task: TrainingTask, work: ClientWork, workers: int, clock: Callable[[], float]
    ):
        self.task, self.work, self.workers, self.clock = task, work, workers, clock
        self.times: dict[Candidate, float] = {}  # seconds a local step of one client
        self.failure = ""  # why a way is not among them

    def run(self, way: Candidate, steps: int) -> None:
        """Measure; what cannot run is left out."""
        try:
            engine = make_engine(
                way.name,
                replace(self.task, phases=(Phase(steps=steps),)),
                way.stack,
                self.workers,
                way.execution,
            )
        except InputError:  # the trial's few steps may need padding where the run itself does not
            return
        with contextlib.closing(engine):
            seconds = _min_time(2, engine, self.work, self.clock)
        if engine.degraded_reason:
            self.failure = f"; {engine.degraded_reason}"
        else:
            self.times[way] = seconds / (steps * len(self.work.clients))

    def refine(self, length: int) -> None:
        """Steps written down and compiled, where the run of so many steps is long enough for it
        to pay, of all that are not hopeless.
        """
        eager = {way: seconds for way, seconds in self.times.items() if way.name != "sequential"}
        hopeful = [way for way, seconds in eager.items() if seconds < MAX_SLOWDOWN * self.fastest]
        for steps in STEPS_OF_A_STACK[1:]:
            if steps == "compiled" and length * self.fastest < COMPILING_PAYS:
                break
            for way in hopeful:
                self.run(way._replace(execution=steps), LONGER_STEPS)

    @property
    def best(self) -> Candidate:
        return take_simplest(self.times)

    @property
    def fastest(self) -> float:
        return min(self.times.values())

    def __str__(self) -> str:
        return ", ".join(f"{way} {1e3 * seconds:.2f}" for way, seconds in self.times.items())


def take_simplest(times: Mapping[EngineKey, float]) -> EngineKey:
    """Of ways to run, the simplest first, the first that is hardly slower than the fastest.

    >>> take_simplest({"eager": 3.0, "captured": 1.04, "compiled": 1.0})
    'captured'
    """
    return next(way for way, seconds in times.items() if seconds <= TIE * min(times.values()))


def choose_steps(
    task: TrainingTask,
    work: ClientWork,
    stack: int,
    rounds: int,
    threads: int,
    clock: Callable[[], float],
) -> EngineChoice:
    """How a stack's steps are best run: plainly, recorded, or, where the run is long enough for
    it, compiled.
    """
    trial = replace(task, phases=(Phase(steps=LONGER_STEPS),))
    some = _subset(work, stack)
    times: dict[str, float] = {}
    why = ""
    share = int(expected_steps(task, work).max()) / LONGER_STEPS  # of the trial's length: a round's
    for steps in STEPS_OF_A_STACK:
        if steps == "compiled" and rounds * share * min(times.values()) < COMPILING_PAYS:
            break
        engine = VectorizedEngine(trial, stack, steps)
        seconds = _min_time(3, engine, some, clock)
        engine.close()
        if engine.degraded_reason:
            why = f"; {engine.degraded_reason}"
        else:
            times[steps] = seconds
    best = take_simplest(times)
    measured = ", ".join(
        f"{steps} {1e3 * seconds / LONGER_STEPS:.2f}" for steps, seconds in times.items()
    )
    where = f"{len(some.clients)} clients as one batched computation on {task.info.device}"
    return EngineChoice(
        "vectorized",
        threads,
        f"vectorized: {where}, steps {best}: milliseconds a step of all of them: {measured}{why}",
        best,
    )


def _subset(work: ClientWork, count: int) -> ClientWork:
    """The first clients of a work."""
    from remanence.core import pytree
    from remanence.core.types import ClientStats

    some = slice(0, count)
    start = work.start.select(some) if work.per_client_start else work.start
    return work._replace(
        clients=work.clients[some],
        start=start,
        client_state=pytree.take(work.client_state, some),
        stats=ClientStats(*(fact[some] for fact in work.stats)),
    )


def _min_time(times: int, engine: Engine, work: ClientWork, clock: Callable[[], float]) -> float:
    """The shortest of several tries: the first one also warms up."""
    best = float("inf")
    for _ in range(times):
        begin = clock()
        for reply in engine.train(work):
            float(reply.loss.sum())  # waits for the device
        best = min(best, clock() - begin)
    return best
