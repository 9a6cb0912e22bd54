"""Runs the runs of a comparison or a recipe: in turn or, on the engine `vectorized`, seeds and
settings of a method in one stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from remanence.config import Experiment
from remanence.core.errors import Stopped
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import Progress, SharedProgress
from remanence.core.safe_path import SafePath
from remanence.core.slots import Method
from remanence.engines.autotune import EngineChoice
from remanence.engines.cost import Workload
from remanence.engines.vectorized import MAX_STACK, VectorizedEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.data_setup import DEFAULT_CLIENTS
from remanence.experiment.task_checks import sample_size
from remanence.results.run import EXPERIMENT, Run
from remanence.rounds.engine_choice import make_run_engine, resolve_engine
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.compatibility import batch_key
from remanence.sweeps.run_batcher import RunBatcher

MAX_BATCHED_RUNS = 64  # a thread each


@dataclass(frozen=True)
class QueuedRun:
    """A run to start, or to resume where it was stopped."""

    folder: SafePath
    config: Experiment
    title: str
    # runs of one task use one engine, so that only the method differs between them
    task: str = ""
    method: Method | None = None  # an object in place of the method that the settings name

    @property
    def started(self) -> bool:
        return (self.folder / EXPERIMENT).is_regular_file()


def run_all(
    runs: Sequence[QueuedRun],
    choices: dict[str, EngineChoice],
    resume_command: str,
    *,
    progress: Progress,
    time_limit: TimeLimit,
    batch_runs: int = 0,
    **objects: Any,
) -> list[Run]:
    """Run all of them.

    Args:
        runs: In this order.
        choices: Engines by task; a missing one is chosen and added.
        resume_command: The command that resumes them, for the message of a run that is stopped.
        progress: Prints.
        time_limit: The time limit.
        batch_runs: The most runs in one stack; 0: as many as fit.
        objects: Model and data that were given as objects.

    Returns:
        The runs, finished.
    """
    done: list[Run] = []
    while runs:
        first = runs[0]
        choice = choices.get(first.task) or _choose(runs, progress, objects)
        choices[first.task] = choice
        group = _group_compatible(runs, choice, batch_runs)
        try:
            if len(group) == 1:
                done.append(_run_one(first, choice, time_limit, progress=progress, **objects))
            else:
                done += _run_batched(group, choice, progress, time_limit, objects)
        except Stopped as stop:
            raise Stopped(
                f"stopped in {_name(group)}, all saved: go on with {resume_command}", stop.exit_code
            ) from None
        runs = runs[len(group) :]
    return done


@preserve_process_state()  # the trial of one task must not change that of the next
def _choose(runs: Sequence[QueuedRun], progress: Progress, objects: dict[str, Any]) -> EngineChoice:
    """The engine of all runs with the task of the first one."""
    run = runs[0]
    if run.started:
        config, about = Run(run.folder).config, Run(run.folder).metadata
        return EngineChoice(
            config.engine,
            config.threads,
            str(about.get("engine", "")),
            config.execution,
            config.stack_size,
        )
    workload = workload_of([each.config for each in runs if each.task == run.task])
    return resolve_engine(
        build(run.config, method=run.method, **objects), progress, workload=workload
    )[1]


def workload_of(configs: Sequence[Experiment]) -> Workload:
    """What the runs of a command train together."""
    return Workload(
        rounds=sum(config.total_rounds for config in configs),
        runs=len(configs),
        methods=len({config.method for config in configs}),
    )


def _group_compatible(
    runs: Sequence[QueuedRun], choice: EngineChoice, batch_runs: int
) -> list[QueuedRun]:
    """The first run and those after it that could share its stack, by their settings alone."""
    first, limit = runs[0], batch_runs or max_runs_per_stack(runs[0].config)
    if choice.name != "vectorized" or limit == 1:
        return [first]
    key = batch_key(first.config)
    compatible = itertools.takewhile(
        lambda run: run.task == first.task and batch_key(run.config) == key, runs
    )
    return list(itertools.islice(compatible, min(limit, MAX_BATCHED_RUNS)))


def max_runs_per_stack(config: Experiment) -> int:
    """How many runs fill a stack."""
    kind = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    return max(
        1,
        (config.stack_size or MAX_STACK[kind])
        // sample_size(config, config.clients.count or DEFAULT_CLIENTS),
    )


def _run_one(run: QueuedRun, choice: EngineChoice, time_limit: TimeLimit, **given: Any) -> Run:
    given["method"] = run.method
    if run.started:
        return resume_run(run.folder, time_limit=time_limit, title=run.title, **given)
    return start_run(
        run.config,
        run.folder,
        overwrite=True,
        choice=choice,
        time_limit=time_limit,
        title=run.title,
        **given,
    )


@preserve_process_state()
def _run_batched(
    group: Sequence[QueuedRun],
    choice: EngineChoice,
    progress: Progress,
    time_limit: TimeLimit,
    objects: dict[str, Any],
) -> list[Run]:
    # torch keeps the number for each thread, and this one computes for the threads of the runs
    torch.set_num_threads(choice.threads)
    batcher, shared = RunBatcher(_make_stack), SharedProgress(progress, _name(group))
    given = objects | {"engine_for": batcher.attach}
    limits = [time_limit.copy() for _ in group]
    ends = batcher.run(
        [
            partial(_run_one, run, choice, limit, progress=shared.for_run(), **given)
            for run, limit in zip(group, limits, strict=True)
        ]
    )
    # the rounds of a stack run together; the next runs check what is left of the time
    time_limit.rounds += max(1, *(limit.rounds for limit in limits))
    errors = [end for end in ends if isinstance(end, BaseException)]
    # raise a failure rather than the stop of the other runs that follows from it
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
    return [end for end in ends if isinstance(end, Run)]


def _name(group: Sequence[QueuedRun]) -> str:
    return group[0].title + (f" and {len(group) - 1} more in one stack" if len(group) > 1 else "")


def _make_stack(experiment: BuiltExperiment) -> VectorizedEngine:
    engine = make_run_engine(experiment)
    assert isinstance(engine, VectorizedEngine)
    return engine
