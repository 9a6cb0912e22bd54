"""Starts, resumes and trains a run.

A run can be stopped at any moment and continues exactly where it was: a state is replaced only when
its round is complete, and what was written after the last checkpoint is cut off and repeated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from remanence.config import Experiment, write_toml
from remanence.core.engine import Engine
from remanence.core.errors import OUT_OF_TIME, CheckpointError, InputError, RunFailed, Stopped
from remanence.core.files import (
    check_output_dir,
    create_output_dir,
    lock,
    translate_disk_errors,
)
from remanence.core.preparation import listening
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import NullProgress, Progress
from remanence.core.safe_path import SafePath
from remanence.core.signals import exit_code_of, sigterm_as_interrupt
from remanence.core.slots import Method, Part
from remanence.data.dataset import ArrayDataset
from remanence.engines.autotune import EngineChoice
from remanence.engines.memory import gpu_memory_text, is_out_of_memory
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.hints import find_hints
from remanence.experiment.metadata import check_same_data
from remanence.experiment.resources import check_disk
from remanence.experiment.torch_setup import set_precision
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.checkpoint_schema import check_schema
from remanence.results.manifest import CHECKPOINTS
from remanence.results.run import COMPARISON, EXPERIMENT, METADATA, METRICS, Run
from remanence.rounds.engine_choice import make_run_engine, record_degraded, resolve_engine
from remanence.rounds.privacy_budget import (
    describe_guarantees,
    guarantees_of,
    last_round,
    to_metadata,
)
from remanence.rounds.round_checks import RoundChecks
from remanence.rounds.setup import Round, first_state, make_round, state_schema
from remanence.rounds.time_limit import TimeLimit
from remanence.training.state import RunState

# Least time between two checkpoints, as a multiple of the time that writing one takes. It does not
# hold where every round has a checkpoint.
PAUSE_FACTOR = 10

EngineFor = Callable[[BuiltExperiment], Engine]  # makes the engine of a run


@preserve_process_state()
def start_run(
    config: Experiment,
    out: Path | SafePath,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    time_limit: TimeLimit | None = None,
    title: str = "",
    choice: EngineChoice | None = None,
    engine_for: EngineFor | None = None,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> Run:
    """Check everything, create the folder and run.

    Args:
        config: The settings.
        out: The run folder.
        overwrite: Replace a run in this folder.
        progress: Shows rounds and messages; None: nothing is shown.
        time_limit: When to stop and save.
        title: Of the progress; by default the method.
        choice: An engine chosen before, as by a comparison; used where the settings say `auto`.
        engine_for: Makes the engine; by default the run has one of its own.
        method: Takes the place of the method that the settings name.
        module: Takes the place of the network.
        source: Takes the place of the data.
    """
    check_output_dir(out, overwrite, (EXPERIMENT, COMPARISON))
    folder = SafePath.of(out)
    progress = progress or NullProgress()
    experiment = build(config, method=method, module=module, source=source)
    objects = {"method": method, "model": module, "data": source}
    given = [name for name, value in objects.items() if value is not None]
    experiment = replace(experiment, metadata=experiment.metadata | {"objects": given})
    check_disk(experiment.resources, folder.path)
    experiment, _ = resolve_engine(experiment, progress, choice)
    create_output_dir(out, overwrite, (EXPERIMENT, COMPARISON))
    with translate_disk_errors(folder, resumable=True), lock(folder):
        metadata = experiment.metadata | privacy_metadata(experiment)
        limit = time_limit or TimeLimit(None)
        return train(experiment, folder, progress, limit, title, engine_for, metadata)


@preserve_process_state()
def resume_run(
    folder: Path | SafePath,
    *,
    rounds: int | None = None,
    progress: Progress | None = None,
    time_limit: TimeLimit | None = None,
    title: str = "",
    engine_for: EngineFor | None = None,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> Run:
    """Continue a run from its last checkpoint.

    Args:
        folder: The run folder.
        rounds: Extend the run to this number of rounds.
        progress: Shows rounds and messages; None: nothing is shown.
        time_limit: When to stop and save.
        title: Of the progress.
        engine_for: Makes the engine.
        method: The method, if the run was started with an object; likewise the two below.
        module: The network.
        source: The data.
    """
    folder = SafePath.of(folder)
    run = Run(folder)
    _check_objects(run, {"method": method, "model": module, "data": source})
    config = run.config if rounds is None else _extend(run, rounds)
    with translate_disk_errors(folder, resumable=True), lock(folder):
        with run.settings_named():
            experiment = build(config, method=method, module=module, source=source)
        check_same_data(experiment, run.metadata)
        metadata = None
        if config != run.config:
            kept = {name: run.metadata[name] for name in ("engine", "objects")}
            metadata = experiment.metadata | privacy_metadata(experiment) | kept
        return train(
            experiment,
            folder,
            progress or NullProgress(),
            time_limit or TimeLimit(None),
            title,
            engine_for,
            metadata,
        )


def _check_objects(run: Run, given: dict[str, Any]) -> None:
    missing = [name for name in run.metadata.get("objects", []) if given[name] is None]
    if missing:
        raise InputError(
            f"{run.folder} was started from Python with its own {missing[0]}: resume it there,"
            f" with rem.resume({str(run.folder)!r}, {missing[0]}=...)"
        )


def _extend(run: Run, rounds: int) -> Experiment:
    """The settings with more rounds."""
    config = run.config
    if config.drift.time_steps > 1 and rounds != config.rounds:
        raise InputError(
            f"{run.folder} has {config.drift.time_steps} time steps of {config.rounds} rounds:"
            " other rounds a time step would be another experiment, so start it anew"
        )
    if rounds < config.rounds:
        raise InputError(
            f"{run.folder} has {config.rounds} rounds: --rounds {rounds} must not be smaller"
        )
    return config.model_copy(update={"rounds": rounds})


def _write_experiment(
    folder: SafePath, experiment: BuiltExperiment, metadata: dict[str, Any]
) -> None:
    text = write_toml(experiment.config, {METADATA: metadata})
    (folder / EXPERIMENT).write(text.encode())


def privacy_metadata(experiment: BuiltExperiment) -> dict[str, Any]:
    """What a run folder stores about privacy."""
    return to_metadata(guarantees_of(experiment), experiment.config.total_rounds)


def train(
    experiment: BuiltExperiment,
    folder: Path | SafePath,
    progress: Progress,
    time_limit: TimeLimit,
    title: str = "",
    engine_for: EngineFor | None = None,
    metadata: dict[str, Any] | None = None,
) -> Run:
    """Train from the last checkpoint, or from the start, to the last round.

    Args:
        experiment: The experiment.
        folder: Of the run.
        progress: Shows rounds and messages.
        time_limit: When to stop and save.
        title: Of the progress.
        engine_for: Makes the engine.
        metadata: Is written with the settings, when a checkpoint is known to fit them.

    Raises:
        Stopped: The time is up, or the process was interrupted. All rounds are saved.
        RunFailed: The machine has too little memory. All rounds before are saved.
    """
    config, folder = experiment.config, SafePath.of(folder)
    set_precision(config)
    store = CheckpointStore(folder / CHECKPOINTS, fingerprint(config))
    check = partial(check_schema, schema=state_schema(experiment))
    saved = store.load(experiment.task.info.device, progress.log, check)
    if saved is None:
        _check_no_rounds(folder)
    state = first_state(experiment) if saved is None else saved
    if metadata is not None:
        _write_experiment(folder, experiment, metadata)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(progress.prepare))
        engine = (engine_for or make_run_engine)(experiment)
        stack.callback(engine.close)
        store.delete_newer()
        round = make_round(experiment, engine, folder, None if saved is None else saved.committed)
        stack.callback(round.close)
        state = replace(state, committed=round.writer.commit())
        title = title or config.method
        loop = TrainingLoop(experiment, folder, engine, round, store, state, progress, title)
        progress.start(title, state.round, loop.last)
        stack.callback(progress.finish)
        loop.run(time_limit)
    return Run(folder, None if saved is None else store.loaded)


def _check_no_rounds(folder: SafePath) -> None:
    """Refuse to begin at round 1 in a folder with recorded rounds, which would be deleted. The
    first checkpoint is older than any of them.
    """
    status = (folder / METRICS).status()
    if status is not None and status.st_size:
        raise CheckpointError(
            f"{folder} has recorded rounds but no checkpoint to continue from: start anew with"
            " --overwrite"
        )


class TrainingLoop:
    """Repeats rounds, and saves their state."""

    def __init__(
        self,
        experiment: BuiltExperiment,
        folder: SafePath,
        engine: Engine,
        round: Round,
        store: CheckpointStore,
        state: RunState,
        progress: Progress,
        title: str = "",
    ):
        self.experiment, self.config, self.folder = experiment, experiment.config, folder
        self.engine, self.round, self.store = engine, round, store
        self.state, self.progress = state, progress
        self.guarantees = guarantees_of(experiment)
        self.last = last_round(self.guarantees, self.config.total_rounds)
        self.title, self.checks = title, RoundChecks(experiment)
        self.degraded_reasons = [""] * len(round.engines)  # those that are logged

    def run(self, time_limit: TimeLimit) -> None:
        """Run rounds until the last one, the time limit or an interrupt."""
        self._log_privacy_budget()
        if not self.state.round:
            for hint in find_hints(self.experiment):
                self.progress.note(hint)
        try:
            # save the first state, too: a model that is given as an object may have other weights
            # when the run is resumed
            self.save()
            with sigterm_as_interrupt():
                self._run_rounds(time_limit)
        except KeyboardInterrupt as stop:
            self.save()
            raise Stopped(
                f"stopped after round {self.state.round} of {self.config.total_rounds}, all saved:"
                f" go on with remanence resume {self.folder}",
                exit_code_of(stop),
            ) from None
        # engines retry with smaller stacks and batches; if memory still does not suffice, the run
        # ends
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.save()
            raise RunFailed(
                f"out of memory in round {self.state.round + 1}"
                f"{gpu_memory_text(self.experiment.task.info.device)}, all before it is saved: go"
                f" on with remanence resume {self.folder} when there is more, or run it with fewer"
                " clients a round"
            ) from error

    def save(self) -> None:
        """Write a checkpoint of the last complete round."""
        self.round.writer.sync()
        self.store.save(self.state)

    def _run_rounds(self, time_limit: TimeLimit) -> None:
        seconds = float(self.config.checkpoint.seconds)
        saved, pause = time.monotonic(), seconds
        while self.state.round < self.last:
            if time_limit.passed():
                self.save()
                raise Stopped(
                    f"time is up after round {self.state.round} of {self.config.total_rounds}: go"
                    f" on with remanence resume {self.folder}",
                    OUT_OF_TIME,
                )
            self.state, line = self.round.run(self.state)
            self._log_degraded()
            time_limit.rounds += 1
            self.progress.round(line)
            for text in self.checks.check(line):
                self.progress.log(f"{self.title}: {text}")
            now = time.monotonic()
            if now - saved >= pause or self.state.round == self.last:
                self.save()
                saved = time.monotonic()
                if seconds:  # what many clients keep takes long to save
                    pause = max(seconds, PAUSE_FACTOR * (saved - now))
        for sentence in describe_guarantees(self.guarantees, self.state.round):
            self.progress.log(sentence)

    def _log_degraded(self) -> None:
        """Log, once, why an engine is slower than requested."""
        for number, engine in enumerate(self.round.engines):
            reason, logged = engine.degraded_reason, self.degraded_reasons[number]
            if reason != logged:
                record_degraded(reason.removeprefix(f"{logged}; "), self.folder, self.progress)
                self.degraded_reasons[number] = reason

    def _log_privacy_budget(self) -> None:
        total = self.config.total_rounds
        if self.last < total:
            self.progress.log(f"the privacy budget ends the run after round {self.last} of {total}")
        if self.state.round:
            for sentence in describe_guarantees(self.guarantees, self.state.round):
                self.progress.log(f"so far {sentence}")
