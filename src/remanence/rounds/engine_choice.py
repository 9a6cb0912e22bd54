"""The engine of a run: the one that its settings name, or the fastest one found in a trial."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from remanence.config import write_toml
from remanence.core.engine import Engine
from remanence.core.preparation import listening
from remanence.core.progress import Progress, duration
from remanence.core.safe_path import SafePath
from remanence.engines.autotune import EngineChoice, choose_engine
from remanence.engines.cost import Workload
from remanence.engines.processes import count_cores
from remanence.engines.table import ENGINES, engine_options
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.resources import check_workers
from remanence.results.readers import read_toml
from remanence.results.run import EXPERIMENT, METADATA, Run
from remanence.rounds.client_sampling import oversample
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state


def resolve_engine(
    experiment: BuiltExperiment,
    progress: Progress,
    choice: EngineChoice | None = None,
    workload: Workload | None = None,
) -> tuple[BuiltExperiment, EngineChoice]:
    """Choose the engine where the settings leave it open and no choice was made before.

    Args:
        experiment: The experiment.
        progress: Shows the choice.
        choice: Made before, as by a comparison.
        workload: All runs that will use the choice. Default: this one.

    Returns:
        The experiment with the engine's settings, threads and workers resolved and the reason in
        its metadata, and the choice.
    """
    experiment = _limit_workers(experiment, progress)
    config, task = experiment.config, experiment.task
    if config.engine != "auto":
        ENGINES[config.engine].check(task, engine_options(config))
        reason = f"{config.engine}: as asked"
        choice = EngineChoice(config.engine, config.threads, reason, config.execution)
    elif choice is None:
        work = make_work(experiment, first_state(experiment), 1)
        with listening(progress.prepare):
            choice = choose_engine(
                task,
                work,
                config.stack_size,
                config.workers,
                workload=workload or Workload(config.total_rounds),
            )
        name, _, reason = choice.reason.partition(": ")
        progress.log(
            f"Using engine '{name}': {reason}; about {duration(choice.expected_s)} of local"
            " training in all."
        )
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


def _limit_workers(experiment: BuiltExperiment, progress: Progress) -> BuiltExperiment:
    """The experiment with no more worker processes than a round can use: one for each of its
    clients, or one for each core, which evaluation uses.
    """
    config, cores = experiment.config, count_cores()
    elsewhere = config.engine == "ray" and (config.ray.address or os.environ.get("RAY_ADDRESS"))
    if config.engine not in ("auto", "processes", "ray") or elsewhere:
        return experiment
    clients = experiment.task.info.num_clients
    if config.clients.sampling == "fixed" and not experiment.is_decentralized:
        clients = oversample(experiment.cohort_size, float(config.round.over_selection), clients)
    workers = min(config.workers, max(clients, cores))
    if workers < config.workers:
        progress.log(
            f"{workers} of {config.workers} workers are used: a round trains"
            f" {clients} client{'s' if clients > 1 else ''}, and this machine has {cores}"
            f" core{'s' if cores > 1 else ''}"
        )
    check_workers(workers)
    return replace(experiment, config=config.model_copy(update={"workers": workers}))


def make_run_engine(experiment: BuiltExperiment) -> Engine:
    """The engine that the settings name, for this run alone."""
    config = experiment.config
    return ENGINES[config.engine].make(experiment.task, engine_options(config))


def record_degraded(reason: str, folder: SafePath, progress: Progress) -> None:
    """Log why an engine runs more slowly than requested, and store it with the run."""
    metadata = read_toml(folder / EXPERIMENT)[METADATA]
    if reason not in metadata["engine"]:
        progress.log(f"slower than asked for: {reason}")
        metadata = metadata | {"engine": f"{metadata['engine']}; {reason}"}
        text = write_toml(Run(folder).config, {METADATA: metadata})
        (folder / EXPERIMENT).write(text.encode())
