"""Builds an experiment: `Experiment` (settings) -> `BuiltExperiment` (objects ready to run).

Whatever can be wrong about an experiment is found here, before a run begins.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from remanence import data as data_sets
from remanence.aggregators.minimum_replies import check_cohort
from remanence.attacks import Adversary, parse_attacks
from remanence.attacks.metadata import count_leaves
from remanence.config import Experiment, optimizer_call
from remanence.core import expressions
from remanence.core.compose import ComposedMethod, parse_method
from remanence.core.compose_checks import check
from remanence.core.errors import InputError, first_line
from remanence.core.model import Model
from remanence.core.rng import Key
from remanence.core.slots import Method, Optimizer, Part, Phase
from remanence.core.types import ClientStats, TaskInfo
from remanence.data.batches import Examples, to_device
from remanence.data.dataset import ArrayDataset, limit_examples
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.data.population import FederatedPopulation
from remanence.engines.memory import gpu_memory, is_out_of_memory
from remanence.experiment.data_setup import (
    FederatedData,
    load_data,
    partition_data,
    select_attackers,
)
from remanence.experiment.metadata import resolve_defaults, run_metadata
from remanence.experiment.networks import make_model
from remanence.experiment.privacy_checks import check_client_privacy, check_example_privacy
from remanence.experiment.resources import (
    Resources,
    check_resources,
    check_threads,
    estimate_resources,
)
from remanence.experiment.run_sizes import sizes_before_building, sizes_of_task
from remanence.experiment.system import ReplyDeadline, parse_deadline, parse_speed
from remanence.experiment.task_checks import (
    can_be_late,
    check_stragglers,
    check_task,
    checked_sample_size,
)
from remanence.experiment.torch_setup import set_up_torch
from remanence.methods import PARTS
from remanence.models import default_model
from remanence.optimizers import LR_SCHEDULES, OPTIMIZERS, LrSchedule, local_buffers
from remanence.peers.availability import Availability, parse_availability
from remanence.peers.topology import TOPOLOGIES, Topology
from remanence.privacy.label_dp import privatize_label_counts
from remanence.training.task import TrainingTask

_BUILDING = threading.Lock()


@dataclass(frozen=True)
class BuiltExperiment:
    """An experiment ready to run."""

    config: Experiment  # with all defaults resolved but the engine's
    dataset: ArrayDataset
    task: TrainingTask
    schedule: LrSchedule
    cohort_size: int  # clients that a round samples
    metadata: dict[str, Any]
    labels: np.ndarray  # of every training example, by id
    adversary: Adversary  # hostile clients, where the experiment has any
    # [K, K] bool: which clients can reach each other; None where there is a server, which may have
    # too many clients for such a table
    topology: np.ndarray | None
    availability: Availability
    step_seconds: np.ndarray  # [K]: simulated seconds of a local step
    deadline: ReplyDeadline
    resources: Resources  # what the run needs of the machine, at least

    @property
    def is_decentralized(self) -> bool:
        """Clients average with peers, without a server."""
        return self.topology is not None

    @property
    def has_stragglers(self) -> bool:
        """Replies can be late in simulated time. Remote clients take real time, which their
        engine keeps.
        """
        return not self.task.clients_remote and can_be_late(self.config)

    def client_stats(self, clients: np.ndarray, time_step: int) -> ClientStats:
        """Sizes and label counts of clients at a time step. -> [k, ...]"""
        info = self.task.info
        if self.task.clients_remote:  # label counts are known to the sites alone
            return ClientStats(
                torch.zeros(len(clients)), torch.zeros(len(clients), info.num_classes)
            )
        data = self.task.population.at(time_step)
        counts = data.label_counts(
            clients,
            self.labels,
            info.num_classes,
            with_validation=self.task.method.counts_validation_labels,
        )
        return ClientStats(
            size=torch.from_numpy(data.train.sizes[clients]).to(info.device, info.dtype),
            label_counts=privatize_label_counts(
                self.task.method.part_filling("privatize_stats"),
                torch.from_numpy(counts).to(info.device, info.dtype),
                clients,
                time_step,
                Key(self.config.seed),
            ),
        )

    def optimizer_hparams(self, round: int) -> dict[str, float]:
        """The numbers of the local optimizer in a round."""
        hparams = dict(self.task.optimizer.hparams)
        return hparams | {"lr": hparams["lr"] * self.schedule(round, self.config.total_rounds)}


def build(
    config: Experiment,
    *,
    method: Method | Part | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
    own: int | None = None,
) -> BuiltExperiment:
    """Build an experiment.

    Only one is built at a time: networks draw their weights from torch's global generator.

    Args:
        config: The settings.
        method: Takes the place of the method that the settings name.
        module: Takes the place of the network.
        source: Takes the place of the data.
        own: How many of the clients are on this machine. Default: all.

    Raises:
        InputError: The settings are wrong or do not fit together.
    """
    check_threads(config)
    try:
        with _BUILDING:
            return _build(config, method, module, source, own)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"the data and the model of this experiment do not fit into memory"
            f" ({first_line(error)}): use fewer examples, fewer clients or a smaller model"
        ) from error


def _build(
    config: Experiment,
    method: Method | Part | None,
    module: nn.Module | None,
    dataset: ArrayDataset | None,
    own: int | None,
) -> BuiltExperiment:
    composed = make_method(config, method)
    optimizer, schedule = _make_optimizer(config)
    device, dtype = set_up_torch(config)
    if dataset is None:
        dataset = load_data(config)
    else:
        dataset = limit_examples(dataset, config.data.limit, config.data.test_limit)
    model_name = config.model or default_model(dataset.kind, dataset.name, dataset.shape)
    sizes = sizes_before_building(config, composed, dataset, module or model_name, device, dtype)
    sizes = sizes if own is None else sizes._replace(own=own)
    check_resources(estimate_resources(sizes), gpu_memory(device))
    key = Key(config.seed)
    adversary, data = select_attackers(
        config, composed, dataset, partition_data(config, dataset, key), key
    )
    clients = data.population.num_clients  # as named in the settings
    if any(p.centralized for p in composed.parts):
        data = replace(data, population=data.population.merge_clients())
    train, test = _make_examples(config, dataset, data, device, dtype)
    two_inputs = train.inputs(torch.arange(2, device=device))
    model = make_model(config, model_name, module, composed.method, dataset, two_inputs, dtype, key)
    info = _make_info(config, dataset, data, model, two_inputs, dtype)
    task = _make_task(config, composed, optimizer, model, info, data, train, test)
    check_task(task)
    check_stragglers(config, composed)
    check_client_privacy(task)
    check_example_privacy(task)
    cohort_size = min(checked_sample_size(config, clients), data.population.num_clients)
    resources = estimate_resources(sizes_of_task(sizes, task, cohort_size))
    check_resources(resources, gpu_memory(device))
    if config.clients.sampling == "poisson":
        task = replace(task, info=replace(task.info, expected_cohort=float(cohort_size)))
    config = resolve_defaults(config, dataset, model_name, clients, device)
    metadata = run_metadata(config, dataset, task, data, adversary)
    topology = _make_topology(config, composed, data.population, key)
    availability = _make_availability(config, data.population, key)
    check_cohort(composed, cohort_size)
    return BuiltExperiment(
        config=config,
        dataset=dataset,
        task=task,
        schedule=schedule,
        cohort_size=cohort_size,
        metadata=metadata,
        labels=data.train.y,
        adversary=replace(adversary, counts=count_leaves(composed.parts, task.payload_spec())),
        topology=topology,
        availability=availability,
        step_seconds=parse_speed(config.clients.speed)(data.population.num_clients, key),
        deadline=parse_deadline(config.round.deadline),
        resources=resources,
    )


def make_method(config: Experiment, method: Method | Part | None) -> ComposedMethod:
    """The experiment's method, or the given one, with the rule for its buffers."""
    if isinstance(method, Part):
        method = Method((method,))
    made = parse_method(config.method, PARTS) if method is None else check(method)
    if config.local.buffers == "local":
        made = made + local_buffers()
    for p in made.parts:
        if p.needs_public_data and config.data.public == 0:
            raise InputError(
                f"{p.name} trains at the server and needs a public set: add --public 1000"
                " (data.public=1000)"
            )
    return ComposedMethod(made)


def _make_optimizer(config: Experiment) -> tuple[Optimizer, LrSchedule]:
    optimizer: Optimizer = expressions.instantiate(optimizer_call(config), OPTIMIZERS, "optimizer")
    schedule: LrSchedule = expressions.instantiate(
        expressions.parse_call(config.local.schedule), LR_SCHEDULES, "schedule"
    )
    return optimizer, schedule


def _make_examples(
    config: Experiment,
    dataset: ArrayDataset,
    data: FederatedData,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Examples, Examples]:
    """Training and test examples on the device; only training examples are augmented."""
    statistics = _statistics(dataset, config.data.normalize)
    train, test = (
        to_device(
            views.x,
            views.y,
            statistics,
            device=device,
            dtype=dtype,
            augment=augment,
            storage_index=views.storage_index,
        )
        for views, augment in ((data.train, config.data.augment), (data.test, ()))
    )
    return train, test


@functools.lru_cache(maxsize=2)
def _statistics(
    dataset: ArrayDataset, normalize: bool | str
) -> tuple[np.ndarray, np.ndarray] | None:
    """What inputs are shifted and divided by, computed once for all runs of a comparison."""
    if normalize == "range":
        return dataset.input_range()
    return dataset.statistics() if normalize else None


def _make_info(
    config: Experiment,
    dataset: ArrayDataset,
    data: FederatedData,
    model: Model,
    two_inputs: torch.Tensor,
    dtype: torch.dtype,
) -> TaskInfo:
    return TaskInfo(
        num_clients=data.population.num_clients,
        num_classes=len(dataset.classes),
        max_client_size=data.population.max_client_size,
        num_examples=len(data.train.y),
        dtype=dtype,
        device=two_inputs.device,
        head=model.head,
        layers=model.layers,
        norms=model.norms,
        buffers=tuple(model.initial.buffers),
        public_size=len(data.public),
        batch_size=min(config.local.batch_size, data.population.max_client_size),
        example_shape=tuple(two_inputs.shape[1:]),
        example_dtype=two_inputs.dtype,
    )


def _make_task(
    config: Experiment,
    method: ComposedMethod,
    optimizer: Optimizer,
    model: Model,
    info: TaskInfo,
    data: FederatedData,
    train: Examples,
    test: Examples,
) -> TrainingTask:
    phase = Phase(epochs=config.local.epochs, steps=config.local.steps)
    phases = method.hook("phases")
    task = TrainingTask(
        model=model,
        method=method,
        optimizer=method.optimizer() or optimizer,
        info=info,
        phases=(phase,) if phases is None else phases(phase),
        batch_size=config.local.batch_size,
        drop_last=config.local.drop_last,
        train=train,
        test=test,
        public=torch.from_numpy(data.public),
        population=data.population,
        average_buffers=config.local.buffers == "average",
    )
    return replace(task, info=replace(info, communicated=task.communicated_params()))


def _topology_rule(config: Experiment) -> Topology:
    rule: Topology = expressions.instantiate(
        expressions.parse_call(config.peers.topology), TOPOLOGIES, "topology"
    )
    return rule


def _make_topology(
    config: Experiment, method: ComposedMethod, population: FederatedPopulation, key: Key
) -> np.ndarray | None:
    """Which clients can reach each other; None where there is a server."""
    rule = _topology_rule(config)
    return None if method.has_server else rule(population.num_clients, key.fold_in("topology"))


def _make_availability(
    config: Experiment, population: FederatedPopulation, key: Key
) -> Availability:
    """Which clients are online when."""
    availability = parse_availability(config.clients.availability)
    _check_clients_exist(availability, population.num_clients, key)
    return availability


def _check_clients_exist(availability: Availability, clients: int, key: Key) -> None:
    """Raise `InputError` for an availability that names clients beyond the last."""
    availability(np.arange(0), clients, 1, key)


def check_names(config: Experiment, method: Method | Part | None = None) -> None:
    """Check what can be checked without data: for all runs of a comparison, before the first."""
    make_method(config, method)
    _make_optimizer(config)
    if config.data.partition:
        expressions.instantiate(
            expressions.parse_call(config.data.partition), data_sets.PARTITIONS, "partition"
        )
    _topology_rule(config)
    parse_availability(config.clients.availability)
    parse_attacks(config.attack)
    parse_speed(config.clients.speed)
    parse_deadline(config.round.deadline)
    if config.drift.schedule:
        expressions.instantiate(
            expressions.parse_call(config.drift.schedule), DRIFT_SCHEDULES, "drift"
        )
