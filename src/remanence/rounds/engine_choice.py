"""The engine of a run: the one that its settings name, or the fastest one found in a trial."""

from __future__ import annotations

from dataclasses import replace

import torch

from remanence.config import Experiment, write_toml
from remanence.core.engine import Engine
from remanence.core.progress import Progress
from remanence.core.safe_path import SafePath
from remanence.engines.autotune import EngineChoice, choose_engine
from remanence.engines.processes import count_cores
from remanence.engines.table import ENGINES, EngineOptions
from remanence.experiment.build import BuiltExperiment
from remanence.results.readers import read_toml
from remanence.results.run import EXPERIMENT, METADATA, Run
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state


def resolve_engine(
    experiment: BuiltExperiment, progress: Progress, choice: EngineChoice | None = None
) -> tuple[BuiltExperiment, EngineChoice]:
    """Choose the engine where the settings leave it open and no choice was made before.

    Returns:
        The experiment with the engine's settings, threads and workers resolved and the reason in
        its metadata, and the choice.
    """
    config, task = experiment.config, experiment.task
    if config.engine != "auto":
        ENGINES[config.engine].check(task, engine_options(config))
        reason = f"{config.engine}: as asked"
        choice = EngineChoice(config.engine, config.threads, reason, config.execution)
    elif choice is None:
        work = make_work(experiment, first_state(experiment), 1)
        choice = choose_engine(
            task, work, config.stack_size, config.workers, rounds=config.total_rounds
        )
        progress.log(f"engine {choice.reason}")
    torch.set_num_threads(choice.threads)
    workers = config.workers
    if not workers and ENGINES[choice.name].on_this_machine:
        workers = count_cores()
    resolved = config.model_copy(
        update={
            "engine": choice.name,
            "threads": choice.threads,
            "workers": workers,
            "execution": choice.execution if config.execution == "auto" else config.execution,
            "stack_size": choice.stack or config.stack_size,
        }
    )
    metadata = experiment.metadata | {"engine": choice.reason}
    return replace(experiment, config=resolved, metadata=metadata), choice


def make_run_engine(experiment: BuiltExperiment) -> Engine:
    """The engine that the settings name, for this run alone."""
    config = experiment.config
    return ENGINES[config.engine].make(experiment.task, engine_options(config))


def engine_options(config: Experiment) -> EngineOptions:
    """The settings of an experiment's engine."""
    return EngineOptions(
        config.stack_size, config.workers, config.execution, float(config.timeout), config.ray
    )


def record_degraded(reason: str, folder: SafePath, progress: Progress) -> None:
    """Log why an engine runs more slowly than requested, and store it with the run."""
    metadata = read_toml(folder / EXPERIMENT)[METADATA]
    if reason not in metadata["engine"]:
        progress.log(f"slower than asked for: {reason}")
        metadata = metadata | {"engine": f"{metadata['engine']}; {reason}"}
        text = write_toml(Run(folder).config, {METADATA: metadata})
        (folder / EXPERIMENT).write(text.encode())
