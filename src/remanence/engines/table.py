"""The table of engines: how each one is checked and made.

An engine is checked before any work, without being built, and built once. The Flower engine is in a
package above this one: `flower` passes it to the round loop, and elsewhere it cannot run. The
names are also in the `Literal` of the setting `engine` (`config/settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from remanence.config import Experiment, RaySettings
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.engines.processes import ProcessEngine, check_processes
from remanence.engines.sequential import SequentialEngine
from remanence.engines.stack_checks import check_stackable
from remanence.engines.vectorized import MAX_STACK, VectorizedEngine
from remanence.training.task import TrainingTask

OUTSIDE_FLOWER = (
    "engine flower works inside a Flower app, where sites can be reached: write one with remanence"
    " flower init DIR --config experiment.toml, then flwr run DIR; or look at a whole federation on"
    " this machine with remanence flower quickstart"
)


@dataclass(frozen=True)
class EngineOptions:
    """The settings of an engine; 0 leaves a size to the engine.

    Attributes:
        stack: The most clients trained together, for engines that stack.
        workers: Processes, for engines that have workers.
        execution: How local steps run: "auto", "eager", "captured" or "compiled".
        timeout: Seconds a worker may take for one request; 0: any time.
        ray: Settings of the engine `ray`.
    """

    stack: int = 0
    workers: int = 0
    execution: str = "auto"
    timeout: float = 1800.0
    ray: RaySettings = field(default_factory=RaySettings)


def engine_options(config: Experiment) -> EngineOptions:
    """The settings of an experiment's engine."""
    return EngineOptions(
        config.stack_size, config.workers, config.execution, float(config.timeout), config.ray
    )


@dataclass(frozen=True)
class EngineEntry:
    """An engine of the table.

    Attributes:
        description: What it is for, in a sentence.
        check: Raises `InputError` where it cannot run a task; builds nothing.
        make: Builds it.
        on_this_machine: Whether its workers use the cores of this machine.
    """

    description: str
    check: Callable[[TrainingTask, EngineOptions], None]
    make: Callable[[TrainingTask, EngineOptions], Engine]
    on_this_machine: bool = True


def _check_sequential(task: TrainingTask, options: EngineOptions) -> None:
    """It runs every task."""


def _make_sequential(task: TrainingTask, options: EngineOptions) -> Engine:
    return SequentialEngine(task)


def _check_vectorized(task: TrainingTask, options: EngineOptions) -> None:
    check_stackable(task)


def _make_vectorized(task: TrainingTask, options: EngineOptions) -> Engine:
    stack = options.stack or MAX_STACK[task.info.device.type]
    return VectorizedEngine(task, stack, options.execution)


def _check_processes(task: TrainingTask, options: EngineOptions) -> None:
    check_processes(task, options.stack)


def _make_processes(task: TrainingTask, options: EngineOptions) -> Engine:
    return ProcessEngine(task, options.workers, options.timeout, options.stack, options.execution)


def _check_ray(task: TrainingTask, options: EngineOptions) -> None:
    from remanence.engines.ray.checks import check_ray

    check_ray(task, options.timeout, **options.ray.model_dump(exclude={"address"}))


def _make_ray(task: TrainingTask, options: EngineOptions) -> Engine:
    from remanence.engines.ray.engine import RayEngine

    return RayEngine(
        task,
        options.workers,
        stack=options.stack,
        execution=options.execution,
        timeout=options.timeout,
        **options.ray.model_dump(),
    )


def _check_flower(task: TrainingTask, options: EngineOptions) -> None:
    raise InputError(OUTSIDE_FLOWER)


def _make_flower(task: TrainingTask, options: EngineOptions) -> Engine:
    raise InputError(OUTSIDE_FLOWER)


ENGINES: dict[str, EngineEntry] = {
    "sequential": EngineEntry(
        "One client after the other with plain autograd: the reference for all engines.",
        _check_sequential,
        _make_sequential,
    ),
    "vectorized": EngineEntry(
        "Many clients in one batched computation, on the CPU or CUDA.",
        _check_vectorized,
        _make_vectorized,
    ),
    "processes": EngineEntry(
        "One process for each CPU core; each trains its clients one after the other or in batches.",
        _check_processes,
        _make_processes,
    ),
    "ray": EngineEntry(
        "Many machines and GPUs: the clients are distributed over the workers of a Ray cluster,"
        " which opens network ports.",
        _check_ray,
        _make_ray,
        on_this_machine=False,
    ),
    "flower": EngineEntry(
        "Real sites that keep their data, over the network, inside a Flower app (see remanence"
        " flower init).",
        _check_flower,
        _make_flower,
    ),
}


def make_engine(
    name: str,
    task: TrainingTask,
    stack: int = 0,
    workers: int = 0,
    execution: str = "auto",
    timeout: float = 1800.0,
    ray: RaySettings | None = None,
) -> Engine:
    """Build the engine of a name; the other arguments are those of `EngineOptions`."""
    options = EngineOptions(stack, workers, execution, timeout, ray or RaySettings())
    return ENGINES[name].make(task, options)
