"""`engine = "auto"`: run the engines that can train a task for a few steps and take the fastest."""

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

WORKER_STACK = 16  # clients that a worker process trains together; more do not fit into its cache
FAST_STEP_S = 0.005  # a step below this many seconds is faster with one thread
SLOW_STEP_S = 0.25  # longer steps are all arithmetic on a CPU: stacking gains nothing
TRIAL_STEPS = 3  # steps that a client makes in a trial
TRIAL_CLIENTS = 16
LONG_TRIAL_STEPS = 8  # in a trial of captured, traced or compiled steps
EXECUTIONS = ("eager", "captured", "compiled")  # the simplest first
# How many seconds the steps of a run must take for a slower start to pay off.
TRACING_PAYS_S = 60.0  # tracing takes a few seconds
COMPILING_PAYS_S = 600.0  # compiling takes about a minute
COMPILING_SLOW_STEPS_PAYS_S = 3600.0  # the same for slow steps: four minutes for a ResNet-18
# A candidate that takes at most this many times as long as the fastest is as good; the first one
# tried is taken, which is the simplest.
TIE = 1.05
# A candidate that takes this many times as long is not traced or compiled: it would not catch up.
MAX_SLOWDOWN = 2.0
NO_STACK = "batch norm with clients of different sizes cannot be stacked"

Clock = Callable[[], float]
EngineKey = TypeVar("EngineKey")


class EngineChoice(NamedTuple):
    """The engine of a run, as it is written into the run's folder."""

    name: str
    threads: int
    reason: str  # in a sentence
    execution: str = "auto"
    stack: int = 0  # clients trained together; 0: left to the engine


class Candidate(NamedTuple):
    """An engine for a CPU and how it runs.

    Processes with a stack of 1 train one client after the other.
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

    def to_choice(self, threads: int, reason: str, stack: int) -> EngineChoice:
        execution = "auto" if self.execution == "eager" else self.execution
        return EngineChoice(self.name, threads, reason, execution, stack)


def choose_engine(
    task: TrainingTask,
    work: ClientWork,
    stack: int = 0,
    workers: int = 0,
    clock: Clock = time.perf_counter,
    rounds: int = 0,
) -> EngineChoice:
    """Choose the engine for a run by measuring on the clients of its first round.

    torch keeps the number of threads that was chosen.

    Args:
        task: What is trained.
        work: The first round.
        stack: The most clients of a stack; 0: the default of the engine.
        workers: Worker processes; 0: one for each core.
        clock: Returns seconds.
        rounds: Of the run; decides whether tracing or compiling steps can pay.
    """
    if task.info.device.type == "cuda":
        return _choose_on_gpu(task, work, stack, clock, rounds)
    threads = torch.get_num_threads()
    one_step = replace(task, phases=(Phase(steps=1),))
    step_s = _min_time(2, SequentialEngine(one_step), work.select(slice(1)), clock)
    # threads that wait for each other cost small networks more than they gain
    if threads > 1 and step_s < FAST_STEP_S:
        torch.set_num_threads(1)
        threads = 1
    if step_s > SLOW_STEP_S:
        return _choose_for_slow_steps(task, work, workers, clock, rounds, step_s, threads)
    return _choose_for_fast_steps(task, work, stack, workers, clock, rounds, threads)


def _choose_on_gpu(
    task: TrainingTask, work: ClientWork, stack: int, clock: Clock, rounds: int
) -> EngineChoice:
    threads = torch.get_num_threads()
    if task.model.depends_on_batch and needs_padding(task):
        return EngineChoice("sequential", threads, f"sequential: {NO_STACK}")
    try:
        return choose_execution(task, work, stack or MAX_STACK["cuda"], rounds, threads, clock)
    except InputError as error:  # torch cannot map the model over a stack
        return EngineChoice("sequential", threads, f"sequential: {error}")


def choose_execution(
    task: TrainingTask, work: ClientWork, stack: int, rounds: int, threads: int, clock: Clock
) -> EngineChoice:
    """How the steps of a stack run best: eager, captured or, in a long run, compiled."""
    trial, some = _make_trial(task, LONG_TRIAL_STEPS), work.select(slice(stack))
    steps = int(expected_steps(trial, some).max())
    times: dict[str, float] = {}
    failure = ""
    # the length of the run, in trials
    trials = rounds * int(expected_steps(task, work).max()) / steps
    for execution in EXECUTIONS:
        if execution == "compiled" and trials * min(times.values()) < COMPILING_PAYS_S:
            break
        with contextlib.closing(VectorizedEngine(trial, stack, execution)) as engine:
            seconds = _min_time(3, engine, some, clock)
        failure = f"; {engine.degraded_reason}" if engine.degraded_reason else failure
        if engine.execution == execution:  # otherwise the steps ran eagerly
            times[execution] = seconds
    best = take_simplest(times)
    measured = ", ".join(
        f"{execution} {1e3 * seconds / steps:.2f}" for execution, seconds in times.items()
    )
    reason = (
        f"vectorized: {len(some.clients)} clients as one batched computation on"
        f" {task.info.device}, steps {best}: milliseconds a step of all of them:"
        f" {measured}{failure}"
    )
    return EngineChoice("vectorized", threads, reason, best)


def _choose_for_fast_steps(
    task: TrainingTask,
    work: ClientWork,
    stack: int,
    workers: int,
    clock: Clock,
    rounds: int,
    threads: int,
) -> EngineChoice:
    some, cores = work.select(slice(TRIAL_CLIENTS)), workers or count_cores()
    padded = task.model.depends_on_batch and needs_padding(task)
    can_fork = _can_fork(work, cores)
    # stacked convolutions are not tried then: steps may be as fast, but evaluation is not
    one_by_one = can_fork and task.model.has_convolutions
    stackable = not padded and len(some.clients) > 1 and not one_by_one
    timings = Timings(task, some, workers, clock)
    timings.run(Candidate("sequential"), TRIAL_STEPS)
    if stackable:
        timings.run(Candidate("vectorized", stack or MAX_STACK["cpu"]), TRIAL_STEPS)
    if one_by_one:
        timings.run(Candidate("processes", 1), TRIAL_STEPS)
    length = _count_steps(task, work, rounds)
    if length * timings.fastest > TRACING_PAYS_S:
        if can_fork and stackable and len(work.clients) >= 2 * cores:
            worker_stack = min(stack or WORKER_STACK, WORKER_STACK)
            timings.run(Candidate("processes", worker_stack), TRIAL_STEPS)
        timings.refine(length)
    best = timings.best
    no_stack = f"; {NO_STACK}" if padded else ""
    reason = (
        f"{best}: milliseconds a local step of one client: {timings}{no_stack}{timings.failure}"
    )
    return best.to_choice(threads, reason, best.stack if best.name == "processes" else stack)


def _choose_for_slow_steps(
    task: TrainingTask,
    work: ClientWork,
    workers: int,
    clock: Clock,
    rounds: int,
    step_s: float,
    threads: int,
) -> EngineChoice:
    """Eager steps or, in a run that is long enough, compiled ones, which need fewer products.

    Trials have a single step, since more take minutes.
    """
    cores = workers or count_cores()
    eager = Candidate("processes", 1) if _can_fork(work, cores) else Candidate("sequential")
    length = _count_steps(task, work, rounds) if _has_fork() else 0
    best, measured = eager, ""
    if length * step_s > COMPILING_SLOW_STEPS_PAYS_S:
        timings = Timings(task, work.select(slice(cores)), workers, clock)  # one client a worker
        timings.run(eager, 1)
        if length * timings.fastest > COMPILING_SLOW_STEPS_PAYS_S:
            timings.run(Candidate("processes", 1, "compiled"), 1)
        best = timings.best
        measured = f"; milliseconds a local step of one client: {timings}{timings.failure}"
    reason = (
        f"{best}: one step takes {step_s:.2f} s, so the arithmetic decides and stacking cannot"
        f" pay{measured}"
    )
    return best.to_choice(threads, reason, best.stack)


def _has_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()


def _can_fork(work: ClientWork, cores: int) -> bool:
    """Can worker processes share the clients?"""
    return cores > 1 and len(work.clients) > 1 and _has_fork()


def _count_steps(task: TrainingTask, work: ClientWork, rounds: int) -> int:
    """Local steps of all clients in the whole run."""
    return rounds * int(expected_steps(task, work).sum())


class Timings:
    """How long candidates take on a CPU: seconds for a local step of one client."""

    def __init__(self, task: TrainingTask, work: ClientWork, workers: int, clock: Clock):
        self.task, self.work, self.workers, self.clock = task, work, workers, clock
        self.times: dict[Candidate, float] = {}
        self.failure = ""  # why a candidate was not measured

    def run(self, candidate: Candidate, steps: int) -> None:
        """Measure a candidate; one that cannot run is left out."""
        trial = _make_trial(self.task, steps)
        try:
            engine = make_engine(
                candidate.name, trial, candidate.stack, self.workers, candidate.execution
            )
        except InputError:  # torch cannot map the model over a stack
            return
        with contextlib.closing(engine):
            seconds = _min_time(2, engine, self.work, self.clock)
        if engine.degraded_reason:
            self.failure = f"; {engine.degraded_reason}"
        else:
            self.times[candidate] = seconds / int(expected_steps(trial, self.work).sum())

    def refine(self, length: int) -> None:
        """Also measure traced and compiled steps, where a run of `length` steps gains by them."""
        eager = {each: s for each, s in self.times.items() if each.name != "sequential"}
        candidates = [
            each for each, seconds in eager.items() if seconds < MAX_SLOWDOWN * self.fastest
        ]
        for execution in EXECUTIONS[1:]:
            if execution == "compiled" and length * self.fastest < COMPILING_PAYS_S:
                break
            for candidate in candidates:
                self.run(candidate._replace(execution=execution), LONG_TRIAL_STEPS)

    @property
    def best(self) -> Candidate:
        return take_simplest(self.times)

    @property
    def fastest(self) -> float:
        return min(self.times.values())

    def __str__(self) -> str:
        return ", ".join(f"{each} {1e3 * seconds:.2f}" for each, seconds in self.times.items())


def take_simplest(times: Mapping[EngineKey, float]) -> EngineKey:
    """The first candidate within `TIE` of the fastest. times: from the simplest candidate on

    >>> take_simplest({"eager": 3.0, "captured": 1.04, "compiled": 1.0})
    'captured'
    """
    return next(each for each, seconds in times.items() if seconds <= TIE * min(times.values()))


def _make_trial(task: TrainingTask, steps: int) -> TrainingTask:
    """The task with so many local steps, or as it is if these alone would need padding.

    Clients whose sizes are not equal can have equal batches in their first steps only.
    """
    trial = replace(task, phases=(Phase(steps=steps),))
    only_trial_padded = (
        task.model.depends_on_batch and needs_padding(trial) and not needs_padding(task)
    )
    return task if only_trial_padded else trial


def _min_time(times: int, engine: Engine, work: ClientWork, clock: Clock) -> float:
    """The shortest of several runs, the first of which also warms up."""
    best = float("inf")
    for _ in range(times):
        begin = clock()
        for reply in engine.train(work):
            float(reply.loss.sum())  # waits for the device
        best = min(best, clock() - begin)
    return best
