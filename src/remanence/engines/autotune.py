"""`engine = "auto"`: run the engines that can train a task for a few steps, and take the one with
which the whole command is expected to end first.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import InputError
from remanence.core.slots import Phase
from remanence.engines.client_plan import expected_steps
from remanence.engines.cost import EXPECTED, Timing, Workload, may_pay, take_simplest
from remanence.engines.processes import count_cores
from remanence.engines.sequential import SequentialEngine
from remanence.engines.stack_checks import UNKEYED, needs_padding
from remanence.engines.table import make_engine
from remanence.engines.vectorized import MAX_STACK
from remanence.training.task import TrainingTask

WORKER_STACK = 16  # clients that a worker process trains together; more do not fit into its cache
FAST_STEP_S = 0.005  # a step below this many seconds is faster with one thread
SLOW_STEP_S = 0.25  # longer steps are all arithmetic on a CPU: stacking gains nothing
TRIAL_STEPS = 3  # steps that a client makes in a trial
TRIAL_CLIENTS = 16
LONG_TRIAL_STEPS = 8  # in a trial of captured, traced or compiled steps
SHORT = 20  # a command of fewer trials than these is not worth one
EXECUTIONS = ("eager", "captured", "compiled")  # the simplest first
# A candidate that takes this many times as long is not traced or compiled: it would not catch up.
MAX_SLOWDOWN = 2.0
NO_STACK = "batch norm with clients of different sizes cannot be stacked"

Clock = Callable[[], float]


class EngineChoice(NamedTuple):
    """The engine of a run, as it is written into the run's folder."""

    name: str
    threads: int
    reason: str  # in a sentence
    execution: str = "auto"
    stack: int = 0  # clients trained together; 0: left to the engine
    expected_s: int = 0  # local training of all runs of the command; 0: not known


class Candidate(NamedTuple):
    """An engine and how it runs.

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


def choose_engine(
    task: TrainingTask,
    work: ClientWork,
    stack: int = 0,
    workers: int = 0,
    clock: Clock = time.perf_counter,
    workload: Workload | None = None,
) -> EngineChoice:
    """Choose the engine for a command by measuring on the clients of its first round.

    torch keeps the number of threads that was chosen.

    Args:
        task: What is trained.
        work: The first round.
        stack: The most clients of a stack; 0: the default of the engine.
        workers: Worker processes; 0: one for each core.
        clock: Returns seconds.
        workload: The runs of the command; decides whether tracing or compiling steps can pay.
            Default: one run of one round.
    """
    workload = workload or Workload()
    if task.model.draws_unkeyed:
        return EngineChoice("sequential", torch.get_num_threads(), f"sequential: {UNKEYED}")
    if task.info.device.type == "cuda":
        return choose_execution(task, work, stack or MAX_STACK["cuda"], clock, workload)
    threads = torch.get_num_threads()
    one_step = replace(task, phases=(Phase(steps=1),))
    step_s = measure(lambda: SequentialEngine(one_step), work.select(slice(1)), clock, 2)[1]
    # threads that wait for each other cost small networks more than they gain
    if threads > 1 and step_s < FAST_STEP_S:
        torch.set_num_threads(1)
        threads = 1
    if step_s > SLOW_STEP_S:
        return _choose_for_slow_steps(task, work, workers, clock, workload, step_s, threads)
    return _choose_for_fast_steps(task, work, stack, workers, clock, workload, threads)


def choose_execution(
    task: TrainingTask, work: ClientWork, stack: int, clock: Clock, workload: Workload
) -> EngineChoice:
    """How the steps of a stack run best: captured, compiled where it may pay, or eager.

    Captured steps were never slower than eager ones, so that a command of few steps takes them
    without measuring them.
    """
    threads = torch.get_num_threads()
    if task.model.depends_on_batch and needs_padding(task):
        return EngineChoice("sequential", threads, f"sequential: {NO_STACK}")
    some = work.select(slice(stack))
    trials = Trials(task, work, some, 0, clock, workload)
    eager = Candidate("vectorized", stack)
    is_short = trials.steps < SHORT * LONG_TRIAL_STEPS * len(some.clients)
    trials.run(eager, 1 if is_short else LONG_TRIAL_STEPS)
    if not trials.timings:  # torch cannot map the model over a stack
        return EngineChoice("sequential", threads, f"sequential: {trials.failure}")
    captured = eager._replace(execution="captured")
    about = f"{len(some.clients)} clients as one batched computation on {task.info.device}"
    if is_short:
        reason = f"{captured}: {about}; too few steps to measure more"
        return EngineChoice(captured.name, threads, reason, captured.execution)
    trials.run(captured, LONG_TRIAL_STEPS)
    trials.refine("compiled")
    return trials.to_choice(threads, 0, about=f"{about}; ")


def _choose_for_fast_steps(
    task: TrainingTask,
    work: ClientWork,
    stack: int,
    workers: int,
    clock: Clock,
    workload: Workload,
    threads: int,
) -> EngineChoice:
    some, cores = work.select(slice(TRIAL_CLIENTS)), workers or count_cores()
    padded = task.model.depends_on_batch and needs_padding(task)
    can_fork = _can_fork(work, cores)
    # stacked convolutions are not tried then: steps may be as fast, but evaluation is not
    one_by_one = can_fork and task.model.has_convolutions
    stackable = not padded and len(some.clients) > 1 and not one_by_one
    trials = Trials(task, work, some, workers, clock, workload)
    trials.run(Candidate("sequential"), TRIAL_STEPS)
    if stackable:
        trials.run(Candidate("vectorized", stack or MAX_STACK["cpu"]), TRIAL_STEPS)
    if one_by_one:
        trials.run(Candidate("processes", 1), TRIAL_STEPS)
    trials.refine("captured")
    if can_fork and stackable and len(work.clients) >= 2 * cores and trials.may_pay("processes"):
        worker_stack = min(stack or WORKER_STACK, WORKER_STACK)
        trials.run(Candidate("processes", worker_stack, "captured"), LONG_TRIAL_STEPS)
    trials.refine("compiled")
    return trials.to_choice(threads, stack, more=f"; {NO_STACK}" if padded else "")


def _choose_for_slow_steps(
    task: TrainingTask,
    work: ClientWork,
    workers: int,
    clock: Clock,
    workload: Workload,
    step_s: float,
    threads: int,
) -> EngineChoice:
    """Eager steps or, in a run that is long enough, compiled ones, which need fewer products.

    Trials have a single step, since more take minutes.
    """
    cores = workers or count_cores()
    eager = Candidate("processes", 1) if _can_fork(work, cores) else Candidate("sequential")
    # one client a worker
    trials = Trials(task, work, work.select(slice(cores)), workers, clock, workload, steps=1)
    at_once = min(cores, len(work.clients)) if eager.name == "processes" else 1
    trials.timings[eager] = Timing(step_s / at_once)
    measured = False
    if _has_fork() and trials.may_pay("compiled"):
        measured = True
        trials.run(eager, 1)
        if trials.may_pay("compiled"):
            trials.run(Candidate("processes", 1, "compiled"), 1)
    about = f"one step takes {step_s:.2f} s, so the arithmetic decides and stacking cannot pay"
    return trials.to_choice(threads, 0, about=f"{about}; " if measured else about, show=measured)


def _has_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()


def _can_fork(work: ClientWork, cores: int) -> bool:
    """Can worker processes share the clients?"""
    return cores > 1 and len(work.clients) > 1 and _has_fork()


class Trials:
    """Candidates that were measured, and what the command would cost on each.

    Args:
        task: What is trained.
        work: The first round.
        some: Its clients that trials train.
        workers: Worker processes; 0: one for each core.
        clock: Returns seconds.
        workload: The runs of the command.
        steps: Steps of a client in a trial of captured or compiled steps.
    """

    def __init__(
        self,
        task: TrainingTask,
        work: ClientWork,
        some: ClientWork,
        workers: int,
        clock: Clock,
        workload: Workload,
        steps: int = LONG_TRIAL_STEPS,
    ):
        self.task, self.some, self.workers, self.clock = task, some, workers, clock
        self.workload, self.trial_steps = workload, steps
        # local steps of all clients in all runs
        self.steps = workload.rounds * int(expected_steps(task, work).sum())
        self.timings: dict[Candidate, Timing] = {}
        self.failure = ""  # why a candidate was not measured

    def run(self, candidate: Candidate, steps: int) -> None:
        """Measure a candidate; one that cannot run is left out."""
        trial = _make_trial(self.task, steps)
        made: list[Engine] = []

        def make() -> Engine:
            made.append(
                make_engine(
                    candidate.name, trial, candidate.stack, self.workers, candidate.execution
                )
            )
            return made[-1]

        some = self.clients_for(candidate)
        try:
            first_s, seconds = measure(make, some, self.clock, 2)
        except InputError as error:  # torch cannot map the model over a stack
            self.failure = str(error)
            return
        (engine,) = made
        if engine.degraded_reason:
            self.failure = engine.degraded_reason
        if _ran_as(engine, candidate.execution):
            step_s = seconds / int(expected_steps(trial, some).sum())
            start_s = max(0.0, first_s - seconds)
            self.timings[candidate] = Timing(step_s, start_s, candidate.execution == "compiled")

    def clients_for(self, candidate: Candidate) -> ClientWork:
        """The clients of a trial: few, where they are trained one after the other."""
        return self.some.select(slice(2)) if candidate.name == "sequential" else self.some

    def may_pay(self, kind: str) -> bool:
        """Whether an execution, or worker processes, are expected to pay for being measured and
        started.
        """
        expected = EXPECTED[self.task.info.device.type, kind].to_timing(
            self.fastest, len(self.task.model.initial.params), kind == "compiled"
        )
        trial = 2 * self.trial_steps * len(self.some.clients)
        return may_pay(min(self.costs.values()), expected, trial, self.steps, self.workload)

    def refine(self, execution: str) -> None:
        """Measure the candidates that could catch up with captured or compiled steps, too, where
        that may pay.
        """
        if not self.may_pay(execution):
            return
        limit = MAX_SLOWDOWN * self.fastest
        promising = {
            (each.name, each.stack): None
            for each, timing in self.timings.items()
            if each.name != "sequential" and timing.step_s < limit
        }
        for name, stack in promising:
            self.run(Candidate(name, stack, execution), self.trial_steps)

    @property
    def costs(self) -> dict[Candidate, float]:
        """Seconds that the command would take from now on."""
        return {
            each: timing.total_s(self.steps, self.workload) for each, timing in self.timings.items()
        }

    @property
    def fastest(self) -> float:
        """Seconds of the fastest step."""
        return min(timing.step_s for timing in self.timings.values())

    def to_choice(
        self, threads: int, stack: int, about: str = "", more: str = "", show: bool = True
    ) -> EngineChoice:
        """The candidate with which the command ends first.

        Args:
            threads: Of torch.
            stack: The most clients of a stack that the settings allow.
            about: Begins the reason.
            more: Ends the reason.
            show: Whether the reason has the times of all candidates.
        """
        costs = self.costs
        best = take_simplest(costs)
        times = self._describe_times(best) if show else ""
        failure = f"; {self.failure}" if self.failure else ""
        return EngineChoice(
            best.name,
            1 if best.name == "processes" else threads,  # the workers use all cores
            f"{best}: {about}{times}{more}{failure}",
            best.execution,
            best.stack if best.name == "processes" else stack,
            math.ceil(costs[best]),
        )

    def _describe_times(self, best: Candidate) -> str:
        """The time of a local step of one client, and in brackets those of the others."""
        times = {each: f"{1e3 * timing.step_s:.2f} ms" for each, timing in self.timings.items()}
        others = ", ".join(f"{each}: {time}" for each, time in times.items() if each != best)
        return f"{times[best]} per local step" + (f" ({others})" if others else "")


def _ran_as(engine: Engine, execution: str) -> bool:
    """Whether steps ran as asked. Workers fall back without changing the parent's engine."""
    if engine.name == "processes":
        return not engine.degraded_reason
    return engine.execution == execution


def _make_trial(task: TrainingTask, steps: int) -> TrainingTask:
    """The task with so many local steps, or as it is if these alone would need padding.

    Clients whose sizes are not equal can have equal batches in their first steps only.
    """
    trial = replace(task, phases=(Phase(steps=steps),))
    only_trial_padded = (
        task.model.depends_on_batch and needs_padding(trial) and not needs_padding(task)
    )
    return task if only_trial_padded else trial


def measure(
    make: Callable[[], Engine], work: ClientWork, clock: Clock, times: int
) -> tuple[float, float]:
    """Make an engine and train several times.

    Returns:
        Seconds of making it and training once; the shortest of the trainings.
    """
    begin = clock()
    first, best = 0.0, float("inf")
    with contextlib.closing(make()) as engine:
        for number in range(times):
            before = clock()
            for reply in engine.train(work):
                float(reply.loss.sum())  # waits for the device
            now = clock()
            first, best = first if number else now - begin, min(best, now - before)
    return first, best
