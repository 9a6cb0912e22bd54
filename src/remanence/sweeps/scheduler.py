"""Run what a comparison or a recipe plans: one run after the other or, where a stack trains
them, seeds and settings of a method together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from remanence.config import Experiment
from remanence.core.errors import Stopped
from remanence.core.progress import Progress, SharedProgress
from remanence.engines.autotune import EngineChoice
from remanence.engines.vectorized import MAX_STACK, VectorizedEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.data_setup import DEFAULT_CLIENTS
from remanence.experiment.task_checks import sample_size
from remanence.results.run import SPEC, Run
from remanence.rounds.loop import TimeLimit, make_run_engine, resolve_engine, resume_run, start_run
from remanence.sweeps.compatibility import batch_key
from remanence.sweeps.shared_engine import RunBatcher

MAX_BATCHED_RUNS = 64  # a thread each


@dataclass(frozen=True)
class QueuedRun:
    """A run that is still to be done, from its beginning or from where it was stopped."""

    folder: Path
    spec: Experiment
    title: str
    # runs of one task use one engine: what differs between them is then the method alone
    task: str = ""

    @property
    def started(self) -> bool:
        return (self.folder / SPEC).exists()


def run_all(
    runs: Sequence[QueuedRun],
    choices: dict[str, EngineChoice],
    go_on_with: str,
    *,
    progress: Progress,
    deadline: TimeLimit,
    batch_runs: int = 0,
    **objects: Any,
) -> None:
    """Run all of them. choices: engines by task, filled where one is missing; batch_runs: the
    most runs in one stack, 0 for as many as fit.
    """
    while runs:
        first = runs[0]
        choice = choices.get(first.task) or _choose(first, progress, objects)
        choices[first.task] = choice
        group = _group_compatible(runs, choice, batch_runs)
        try:
            if len(group) == 1:
                _run_one(first, choice, deadline, progress=progress, **objects)
            else:
                _run_batched(group, choice, progress, deadline, objects)
        except Stopped as stop:
            raise Stopped(
                f"stopped in {_name(group)}, all saved: go on with {go_on_with}", stop.exit_code
            ) from None
        runs = runs[len(group) :]


def _choose(run: QueuedRun, progress: Progress, objects: dict[str, Any]) -> EngineChoice:
    if run.started:
        spec, about = Run(run.folder).config, Run(run.folder).metadata
        return EngineChoice(
            spec.engine, spec.threads, str(about.get("engine", "")), spec.execution, spec.stack_size
        )
    return resolve_engine(build(run.spec, **objects), progress)[1]


def _group_compatible(
    runs: Sequence[QueuedRun], choice: EngineChoice, batch_runs: int
) -> list[QueuedRun]:
    """The first run and those behind it that can share its stack, as far as can be told before
    they are built.
    """
    first, most = runs[0], batch_runs or max_runs_per_stack(runs[0].spec)
    if choice.name != "vectorized" or most == 1:
        return [first]
    form = batch_key(first.spec)
    alike = itertools.takewhile(
        lambda run: run.task == first.task and batch_key(run.spec) == form, runs
    )
    return list(itertools.islice(alike, min(most, MAX_BATCHED_RUNS)))


def max_runs_per_stack(spec: Experiment) -> int:
    """How many runs fill a stack."""
    kind = "cuda" if spec.device != "cpu" and torch.cuda.is_available() else "cpu"
    return max(
        1,
        (spec.stack_size or MAX_STACK[kind])
        // sample_size(spec, spec.clients.count or DEFAULT_CLIENTS),
    )


def _run_one(run: QueuedRun, choice: EngineChoice, deadline: TimeLimit, **given: Any) -> Run:
    if run.started:
        return resume_run(run.folder, deadline=deadline, title=run.title, **given)
    return start_run(
        run.spec,
        run.folder,
        overwrite=True,
        choice=choice,
        deadline=deadline,
        title=run.title,
        **given,
    )


def _run_batched(
    group: Sequence[QueuedRun],
    choice: EngineChoice,
    progress: Progress,
    deadline: TimeLimit,
    objects: dict[str, Any],
) -> None:
    meeting, chorus = RunBatcher(_make_stack), SharedProgress(progress, _name(group))
    given = objects | {"engine_for": meeting.attach}
    ends = meeting.run(
        [
            partial(_run_one, run, choice, deadline.copy_for(), progress=chorus.for_run(), **given)
            for run in group
        ]
    )
    deadline.rounds += 1  # time has passed: the next ones must ask whether there is any left
    errors = [end for end in ends if isinstance(end, BaseException)]
    # what went wrong before what was stopped because of it
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def _name(group: Sequence[QueuedRun]) -> str:
    return group[0].title + (f" and {len(group) - 1} more in one stack" if len(group) > 1 else "")


def _make_stack(experiment: BuiltExperiment) -> VectorizedEngine:
    engine = make_run_engine(experiment)
    assert isinstance(engine, VectorizedEngine)
    return engine
