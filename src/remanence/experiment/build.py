"""From a spec to the objects of a run: data, partition, model, method, task. Everything that
can be wrong about an experiment is found here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from remanence import data
from remanence.aggregators.minimum_replies import check_cohort
from remanence.attacks import Adversary, parse_attacks
from remanence.attacks.metadata import count_leaves
from remanence.config import Experiment, optimizer_call
from remanence.core import expressions
from remanence.core import model as models_
from remanence.core.compose import ComposedMethod, check, describe, parse_method
from remanence.core.errors import InputError
from remanence.core.files import sha256
from remanence.core.hardware import describe_machine
from remanence.core.rng import Key
from remanence.core.slots import Method, Part, Phase
from remanence.core.types import ClientStats, TaskInfo
from remanence.data.batches import to_device
from remanence.data.dataset import ArrayDataset
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.experiment.checks import check_client_privacy, check_example_privacy
from remanence.experiment.data_setup import (
    FederatedData,
    load_data,
    partition_data,
    select_attackers,
)
from remanence.experiment.system import ReplyDeadline, oversample, parse_deadline, parse_speed
from remanence.methods import PARTS
from remanence.models import MODELS, default_model
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS, LrSchedule, local_buffers
from remanence.peers.availability import Availability, parse_availability
from remanence.peers.topology import TOPOLOGIES
from remanence.privacy.label_dp import privatize_counts
from remanence.training.task import TrainingTask
from remanence.version import __version__

SHOWN_CLIENTS = 200  # clients whose label counts are written down for the report


_BUILDING = threading.Lock()


@dataclass(frozen=True)
class BuiltExperiment:
    """An experiment ready to run."""

    config: Experiment  # with every choice but the engine's settled
    dataset: ArrayDataset
    task: TrainingTask
    schedule: LrSchedule
    cohort_size: int
    metadata: dict[str, Any]
    labels: np.ndarray  # of every training example, by id
    adversary: Adversary  # hostile clients, where the experiment has any
    # [K, K] bool: who can reach whom; None where there is a server, which may have far too many
    # clients for it
    topology: np.ndarray | None
    availability: Availability
    seconds: np.ndarray  # [K]: simulated seconds a local step takes
    deadline: ReplyDeadline

    @property
    def has_stragglers(self) -> bool:
        """Can anybody be late, in simulated time? Where clients are real, so is their time, and
        the engine keeps it.
        """
        return not self.task.clients_remote and (
            self.config.round.deadline != "none" or self.config.round.over_selection > 1
        )

    def online(self, round: int, key: Key) -> np.ndarray:
        """Who answers in a round; `key` is the round's. -> [K] bool"""
        return self.availability(self.task.info.num_clients, round, key)

    def cohort(self, round: int, key: Key, busy: Sequence[int] = ()) -> np.ndarray:
        """The clients that are asked in a round, among those that are there and not busy: so
        many without replacement, or by coins. -> [k] ascending
        """
        there = np.setdiff1d(
            np.flatnonzero(self.online(round, key)), np.asarray(busy, dtype=np.int64)
        )
        if self.config.clients.sampling == "poisson":
            # one for each client, whoever else is there
            coins = key.fold_in("cohort").uniform(self.task.info.num_clients)
            return np.asarray(there[coins[there] < self.cohort_size / self.task.info.num_clients])
        count = oversample(self.cohort_size, float(self.config.round.over_selection), len(there))
        return np.asarray(there[key.fold_in("cohort").choice(len(there), count)])

    def client_stats(self, clients: np.ndarray, time_step: int) -> ClientStats:
        """Facts of these clients at a time step. -> [k, ...]"""
        world = self.task.info
        if self.task.clients_remote:  # nobody here knows them
            return ClientStats(
                torch.zeros(len(clients)), torch.zeros(len(clients), world.num_classes)
            )
        counts = self.task.population.at(time_step).label_counts(
            clients, self.labels, world.num_classes
        )
        label_counts = torch.from_numpy(counts).to(world.device, world.dtype)
        size, blur = label_counts.sum(dim=1), self.task.method.part_filling("privatize_stats")
        return ClientStats(
            size=size,
            label_counts=privatize_counts(
                blur, label_counts, clients, time_step, Key(self.config.seed)
            ),
        )

    def optimizer_hparams(self, round: int) -> dict[str, float]:
        """The optimizer's numbers in a round."""
        numbers = dict(self.task.optimizer.hparams)
        return numbers | {"lr": numbers["lr"] * self.schedule(round, self.config.total_rounds)}


def build(
    spec: Experiment,
    *,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> BuiltExperiment:
    """Objects given here take the place of what the spec names. One at a time: networks draw
    their weights from torch's one global generator.
    """
    with _BUILDING:
        return _build(spec, method, module, source)


def _build(
    spec: Experiment,
    method: Method | Part | None,
    module: nn.Module | None,
    source: ArrayDataset | None,
) -> BuiltExperiment:
    composed = make_method(spec, method)
    optimizer = expressions.instantiate(optimizer_call(spec), OPTIMIZERS, "optimizer")
    schedule = expressions.instantiate(
        expressions.parse_call(spec.local.schedule), LR_SCHEDULES, "schedule"
    )
    device, dtype = _set_up_torch(spec)
    if source is None:
        source = load_data(spec)
    key = Key(spec.seed)
    adversary, division = select_attackers(
        spec, composed, source, partition_data(spec, source, key), key
    )
    public, population = division.public, division.population
    named_clients = population.num_clients
    if any(p.centralized for p in composed.parts):
        population = population.merge_clients()
    statistics = _statistics(source) if spec.data.normalize else None
    seen = division.train, division.test
    train = to_device(
        seen[0].x,
        seen[0].y,
        statistics,
        device=device,
        dtype=dtype,
        augment=spec.data.augment,
        storage_index=seen[0].storage_index,
    )
    test = to_device(
        seen[1].x,
        seen[1].y,
        statistics,
        device=device,
        dtype=dtype,
        storage_index=seen[1].storage_index,
    )
    classes, shape = len(source.classes), source.shape
    model_name = spec.model or default_model(source.kind, source.name, shape)
    if module is None:
        module = models_.init_module(
            lambda: build_module(model_name, shape, classes), key.fold_in("model")
        )
    module = apply_model_changes(composed.method, module, classes, key)
    _check_vocabulary(module, source)
    two_rows = train.inputs(torch.arange(2, device=device))
    model = models_.functionalize(
        module,
        two_rows,
        classes,
        dtype=dtype,
        device=device,
        freeze_buffers=spec.local.buffers == "frozen",
        autocast=torch.bfloat16 if spec.precision == "bf16" else None,
    )
    world = TaskInfo(
        num_clients=population.num_clients,
        num_classes=classes,
        max_client_size=population.max_client_size,
        num_examples=len(division.train.y),
        dtype=dtype,
        device=device,
        head=model.head,
        layers=model.layers,
        norms=model.norms,
        buffers=tuple(model.initial.buffers),
        public_size=len(public),
        batch_size=min(spec.local.batch_size, population.max_client_size),
        example_shape=tuple(two_rows.shape[1:]),
        example_dtype=two_rows.dtype,
    )
    phase = Phase(epochs=spec.local.epochs, steps=spec.local.steps)
    phases = composed.hook("phases")
    task = TrainingTask(
        model=model,
        method=composed,
        optimizer=composed.optimizer() or optimizer,
        info=world,
        phases=(phase,) if phases is None else phases(phase),
        batch_size=spec.local.batch_size,
        drop_last=spec.local.drop_last,
        train=train,
        test=test,
        public=torch.from_numpy(public),
        population=population,
        average_buffers=spec.local.buffers == "average",
    )
    task = replace(task, info=replace(world, communicated=task.communicated_params()))
    _check_task(task)
    for p in composed.parts:
        if p.validate is not None:
            p.validate(task.optimizer, task.info)
    check_client_privacy(task)
    check_example_privacy(task)
    size = min(_cohort_size(spec, named_clients), population.num_clients)
    if spec.clients.sampling == "poisson":
        task = replace(task, info=replace(task.info, expected_cohort=float(size)))
    settled = _resolve_defaults(spec, model_name, named_clients, device)
    about = _run_metadata(settled, source, task, division, adversary.clients.tolist())
    lay = expressions.instantiate(
        expressions.parse_call(spec.peers.topology), TOPOLOGIES, "topology"
    )
    topology = (
        lay(population.num_clients, key.fold_in("topology"))
        if composed.part_filling("peers") is not None
        else None
    )
    availability = parse_availability(spec.clients.availability)
    availability(population.num_clients, 1, key)  # refuses clients that do not exist
    check_cohort(composed, size)
    seconds, deadline = (
        parse_speed(spec.clients.speed)(population.num_clients, key),
        parse_deadline(spec.round.deadline),
    )
    counts = count_leaves(composed.parts, task.payload_spec())
    experiment = BuiltExperiment(
        settled,
        source,
        task,
        schedule,
        size,
        about,
        division.train.y,
        replace(adversary, counts=counts),
        topology,
        availability,
        seconds,
        deadline,
    )
    _check_stragglers(settled, composed)
    return experiment


def _check_stragglers(spec: Experiment, method: ComposedMethod) -> None:
    """Refuse ways of waiting that mean nothing for a method."""
    if method.part_filling("peers") is not None and spec.round.over_selection > 1:
        raise InputError(
            "round.over_selection means nothing without a server, where nobody waits for a"
            " number of answers: leave it out"
        )
    several = (
        method.part_filling("peers") is not None
        or method.part_filling("model_assignment") is not None
    )
    if several and spec.round.deadline != "none" and spec.round.late == "use":
        raise InputError(
            "round.late=use is for methods with one server model, to which a late answer can"
            " be added: use round.late=discard"
        )


@functools.lru_cache(maxsize=2)
def _statistics(source: ArrayDataset) -> tuple[np.ndarray, np.ndarray] | None:
    """Once a source, not once a run: a comparison uses the same data many times."""
    return source.statistics()


def check_names(spec: Experiment, method: Method | Part | None = None) -> None:
    """What can be checked without data: for the cells of a comparison, before the first one
    starts.
    """
    make_method(spec, method)
    expressions.instantiate(optimizer_call(spec), OPTIMIZERS, "optimizer")
    expressions.instantiate(expressions.parse_call(spec.local.schedule), LR_SCHEDULES, "schedule")
    expressions.instantiate(
        expressions.parse_call(spec.data.partition), data.PARTITIONS, "partition"
    )
    expressions.instantiate(expressions.parse_call(spec.peers.topology), TOPOLOGIES, "topology")
    parse_availability(spec.clients.availability)
    parse_attacks(spec.attack)
    parse_speed(spec.clients.speed)
    parse_deadline(spec.round.deadline)
    if spec.drift.schedule:
        expressions.instantiate(
            expressions.parse_call(spec.drift.schedule), DRIFT_SCHEDULES, "drift"
        )


def make_method(spec: Experiment, method: Method | Part | None) -> ComposedMethod:
    if isinstance(method, Part):
        method = Method((method,))
    made = parse_method(spec.method, PARTS) if method is None else check(method)
    if spec.local.buffers == "local":
        made = made + local_buffers()
    for p in made.parts:
        if p.needs_public_data and spec.data.public == 0:
            raise InputError(
                f"{p.name} trains at the server and needs a public set: add --public 1000"
                " (data.public=1000)"
            )
    return ComposedMethod(made)


def build_module(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of ours by name, or the user's by import path (`package.module:Class(width=3)`)."""
    call = expressions.parse_call(name)
    if ":" not in call.name:
        built: nn.Module = expressions.instantiate(call, MODELS, "model", shape, classes)
        return built
    maker = _import(call.name)
    accepted = inspect.signature(maker).parameters
    known = {
        name: value
        for name, value in {"shape": shape, "classes": classes}.items()
        if name in accepted
    }
    try:
        return maker(**known | dict(call.arguments))  # type: ignore[no-any-return]
    except TypeError as error:
        raise InputError(f"model {call.name} cannot be built: {error}") from error


def apply_model_changes(method: Method, module: nn.Module, classes: int, key: Key) -> nn.Module:
    """The network as the method's parts need it; new layers draw their weights from keys of
    their own.
    """
    for p in method.parts:
        if p.modify_model is not None:
            adapt, before = p.modify_model, module
            module = models_.init_module(
                lambda adapt=adapt, before=before: adapt(before, classes),
                key.fold_in("adapt", p.name),
            )
    return module


def _import(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    here = os.getcwd()
    # a user's own file beside the experiment, as `python -m` would find it
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise InputError(
            f"model {path}: cannot import {module_name} ({error}); the path is package.module:Class"
        ) from error
    except AttributeError:
        raise InputError(f"model {path}: {module_name} has no {attribute}") from None
    if not callable(found):
        raise InputError(
            f"model {path}: {attribute} is not a class or function that makes a network"
        )
    return found  # type: ignore[no-any-return]


def _set_up_torch(spec: Experiment) -> tuple[torch.device, torch.dtype]:
    name = spec.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: use cpu, cuda, cuda:0 or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise InputError(
            f"device {name!r} was asked for, but torch sees no such CUDA device here: use"
            " --device cpu, or install a CUDA build of torch"
        )
    if spec.precision == "tf32" and device.type != "cuda":
        raise InputError("precision tf32 exists on CUDA devices only: use fp32")
    if spec.precision == "bf16" and device.type != "cuda":
        raise InputError("precision bf16 is for CUDA devices: use fp32 on the CPU")
    if spec.threads:
        torch.set_num_threads(spec.threads)
    set_precision(spec)
    return device, torch.float64 if spec.precision == "fp64" else torch.float32


def set_precision(spec: Experiment) -> None:
    """torch keeps these settings for the whole process: whoever plays an experiment after
    building another has to say them again.
    """
    tf32 = spec.precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if spec.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(spec.deterministic)


def _check_vocabulary(module: nn.Module, source: ArrayDataset) -> None:
    vocabulary = getattr(module, "vocabulary", None)
    if source.kind == "tokens" and isinstance(vocabulary, int):
        largest = int(max(source.train.x.max(), source.test.x.max()))
        if largest >= vocabulary:
            raise InputError(
                f"the data hold token {largest}, but the model knows {vocabulary} tokens: use"
                f" text(vocabulary={largest + 1})"
            )


def _check_task(task: TrainingTask) -> None:
    if not all(task.trained_params(phase) for phase in task.phases):
        raise InputError(
            f"method {describe(task.method.method)} leaves nothing to train: every parameter"
            " of the model is frozen"
        )
    if task.model.depends_on_batch and _has_batch_of_one(task):
        one = task.train.inputs(torch.zeros(1, dtype=torch.int64, device=task.info.device))
        try:
            task.model.apply(
                *task.model.initial, one, torch.zeros((), dtype=torch.int64, device=one.device)
            )
        except ValueError as error:
            raise InputError(
                "some client has a batch of a single example, on which batch norm cannot"
                f" train ({error}):"
                " change local.batch_size, set local.drop_last=true, or use a model with group norm"
            ) from None


def _has_batch_of_one(task: TrainingTask) -> bool:
    for holdings in task.population.time_steps:
        for size in np.unique(holdings.train.sizes):
            batch = min(task.batch_size, int(size))
            if batch == 1 or (size % batch == 1 and not task.drop_last):
                return True
    return False


def sample_size(spec: Experiment, clients: int) -> int:
    """How many of so many clients a round asks."""
    sample = clients if spec.clients.sample is None else spec.clients.sample
    return max(1, round(sample * clients)) if isinstance(sample, float) else sample


def _cohort_size(spec: Experiment, clients: int) -> int:
    """The same, checked."""
    size = sample_size(spec, clients)
    if size > clients:
        raise InputError(f"clients.sample={size} is more than the {clients} clients there are")
    if spec.round.min_replies > size:
        raise InputError(
            f"round.min_replies={spec.round.min_replies} can never be reached: a round asks"
            f" {size} clients"
        )
    return size


def _resolve_defaults(
    spec: Experiment, model_name: str, clients: int, device: torch.device
) -> Experiment:
    """Write every default into the spec that depends on where it runs, so that a resumed run
    uses the same.
    """
    directory = spec.data.dir or os.environ.get("REMANENCE_DATA", "")
    return spec.model_copy(
        update={
            "model": model_name,
            "threads": spec.threads or torch.get_num_threads(),
            "device": str(device),
            "clients": spec.clients.model_copy(update={"count": clients}),
            "data": spec.data.model_copy(
                update={"dir": str(Path(directory).resolve()) if directory else ""}
            ),
        }
    )


def _run_metadata(
    spec: Experiment,
    source: ArrayDataset,
    task: TrainingTask,
    division: FederatedData,
    attackers: Sequence[int],
) -> dict[str, Any]:
    some = np.arange(min(task.info.num_clients, SHOWN_CLIENTS))
    label_counts = task.population.at(0).label_counts(some, division.train.y, task.info.num_classes)
    shape = "x".join(str(side) for side in source.shape)
    sizes = (
        f"{len(source.train)} training and {len(source.test)} test examples of shape {shape},"
        f" {len(source.classes)} classes"
    )
    return {
        "remanence": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": describe_machine(str(task.info.device)),
        "data": f"{source.name}: {sizes}. {source.note}".strip(),
        "class_names": list(source.classes),
        "clients": task.info.num_clients,
        "parameters": sum(p.numel() for p in task.model.initial.params.values()),
        "shape": list(source.shape),
        "kind": source.kind,
        "mean": [] if task.train.mean is None else task.train.mean.double().flatten().tolist(),
        "std": [] if task.train.std is None else task.train.std.double().flatten().tolist(),
        "label_counts": [" ".join(map(str, row)) for row in label_counts.tolist()],
        **({"attackers": " ".join(map(str, attackers))} if len(attackers) else {}),
        "evaluated": "global"
        if task.method.part_filling("peers") is None
        and task.method.part_filling("model_assignment") is None
        else "personal",
    } | _drift_metadata(spec, task, division)


def _table_of(spec: Experiment) -> Path | None:
    """The file of a drift schedule that is read from one."""
    call = expressions.parse_call(spec.drift.schedule)
    return (
        Path(str(call.arguments["path"])).expanduser()
        if call.name == "table" and "path" in call.arguments
        else None
    )


def check_same_data(experiment: BuiltExperiment, about: Mapping[str, Any]) -> None:
    """Refuse to go on where data or drift are no longer what they were when the run began: the
    rest would be of another experiment.
    """
    now, table = (
        experiment.metadata,
        _table_of(experiment.config) if experiment.config.drift.schedule else None,
    )
    if table is not None and about.get("drift_table", now.get("drift_table")) != now.get(
        "drift_table"
    ):
        raise InputError(
            f"the drift table {table} has changed since the run began: put the old file back,"
            " or start anew"
        )
    held = [[int(count) for count in row.split()] for row in now["label_counts"]]
    if (
        about.get("label_counts") != held
        or about.get("class_names", now["class_names"]) != now["class_names"]
    ):
        raise InputError(
            f"the data {experiment.config.data.name} have changed since the run began: put the"
            " old ones back, or start anew"
        )


def _drift_metadata(
    spec: Experiment, task: TrainingTask, division: FederatedData
) -> dict[str, Any]:
    if not spec.drift.schedule:
        return {}
    return {
        "rounds_per_step": spec.rounds,
        "clusters": [
            " ".join(map(str, step.cluster.tolist())) for step in task.population.time_steps
        ],
        **(
            {"drift_table": sha256(table.read_bytes())}
            if (table := _table_of(spec)) is not None
            else {}
        ),
        "concepts": list(division.concepts),
        "drift_notes": list(division.notes),
    }
