"""A site's own data as a task for a local engine.

The task has all K clients of the experiment, so that a client has the same number everywhere, but
only the site's own clients have examples. In trials these are the clients' shares of a published
dataset, with the same ids as on one machine, so that the results are the same. Real sites number
their own examples, and never send the ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from remanence.config import Experiment
from remanence.core.compose import parse_method
from remanence.core.compose_checks import SERVER_SLOTS
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.core.slots import Method, Part
from remanence.data import DATASETS
from remanence.data.dataset import ArrayDataset
from remanence.data.population import ClientData, FederatedPopulation, PartitionIndices
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment, build
from remanence.flower.refusals import Declined
from remanence.flower.settings import SIMULATED_SHARE, SiteFile
from remanence.flower.site_files import join_datasets, read_client
from remanence.methods import PARTS
from remanence.training.task import TrainingTask

PUBLISHED = frozenset(DATASETS) - {
    "folder",
    "hub",
    "npz",
    "pfllib",
    "table",
}  # datasets with the same files everywhere
# slots that a site leaves empty; fine-tuning of personal models runs there. The coordinator has
# validated the method, with its public examples
NOT_AT_SITES = ({*SERVER_SLOTS} - {"personalize"}) | {"peers", "validate"}


@dataclass(frozen=True)
class SiteTask:
    """One experiment at a site: the task with the site's examples, and an engine for it."""

    experiment: BuiltExperiment
    engine: Engine
    simulated: bool  # the examples are shares of the experiment's own data
    uses_counts: str = ""  # the part that chooses models by exact counts and losses
    own_statistics: bool = False  # all examples are normalized with their own mean

    @property
    def task(self) -> TrainingTask:
        return self.experiment.task

    def sizes(self, clients: Sequence[int]) -> dict[str, list[list[int]]]:
        """How many examples clients have.

        Returns:
            By client: [training, validation] for each time step, then [test].
        """
        population = self.task.population
        tests = (
            [0] * population.num_clients
            if self.simulated
            else [len(rows) for rows in population.test_ids]
        )
        return {
            str(client): [
                *(
                    [int(step.train.sizes[client]), int(step.valid.sizes[client])]
                    for step in population.time_steps
                ),
                [tests[client]],
            ]
            for client in clients
        }


def build_site_task(site: SiteFile, config: Experiment, expected: Mapping[str, Any]) -> SiteTask:
    """Read the site's data and build the experiment on them.

    Args:
        site: The site's settings.
        config: The experiment as the coordinator sent it.
        expected: The coordinator's description of examples: classes, shape, kind, mean, std.
    """
    compute, clients = site.settings.compute, tuple(site.clients)
    count = config.clients.count or 0
    foreign = next((client for client in clients if client >= count), None)
    if foreign is not None:
        raise Declined(
            "setup",
            f"this site has a client {foreign}, but the experiment's {count} clients are"
            f" numbered 0 to {count - 1}: change site.toml",
        )
    local = config.model_copy(
        update={
            "device": compute.device,
            "threads": compute.threads,
            "engine": "sequential",
            "attack": "",
        }
    )
    simulated = site.clients[clients[0]] == SIMULATED_SHARE
    experiment = (
        _build_simulated(local, clients)
        if simulated
        else _build_from_files(site, local, expected, count)
    )
    task = experiment.task
    engine = make_local_engine(compute.engine, task, len(clients))
    uses_counts = next(
        (
            p.name
            for p in parse_method(config.method, PARTS).parts
            if p.peers is not None or p.model_assignment is not None
        ),
        "",
    )
    # shares are normalized with the statistics of published data
    shared_statistics = config.data.normalize is True and expected.get("std")
    own_statistics = not simulated and task.train.mean is not None and not shared_statistics
    return SiteTask(experiment, engine, simulated, uses_counts, own_statistics)


def make_local_engine(name: str, task: TrainingTask, num_clients: int) -> Engine:
    """The engine for a site's own clients: vectorized if there are several and the model allows
    it.
    """
    if name != "sequential" and num_clients > 1:
        with contextlib.suppress(InputError):
            return make_engine("vectorized", task)
        if name == "vectorized":
            raise Declined(
                "setup",
                "compute.engine is vectorized, but this model cannot be vectorized over clients"
                " of different sizes: use auto",
            )
    return make_engine("sequential", task)


def is_published(name: str) -> bool:
    """Whether data are those of a published dataset."""
    return name.partition("(")[0].strip() in PUBLISHED


def _build_simulated(config: Experiment, clients: Sequence[int]) -> BuiltExperiment:
    # a coordinator must not be able to make a site read its own files
    if not is_published(config.data.name):
        raise Declined(
            "policy",
            "this site has shares of published data, but the experiment's data are"
            f" {config.data.name!r}: name a published dataset",
        )
    experiment = build(config, own=len(clients))
    population = experiment.task.population
    # without the examples of other sites' clients
    steps = tuple(
        ClientData(_select(step.train, clients), _select(step.valid, clients), step.cluster)
        for step in population.time_steps
    )
    return replace(
        experiment, task=replace(experiment.task, population=replace(population, time_steps=steps))
    )


def _select(indices: PartitionIndices, clients: Sequence[int]) -> PartitionIndices:
    own = {client: indices.for_client(client) for client in clients}
    return spread(own, len(indices.sizes))


def spread(own: Mapping[int, np.ndarray], count: int) -> PartitionIndices:
    """The examples of some of `count` clients; the others have none.

    >>> spread({2: np.array([5, 6])}, 4).offsets.tolist()
    [0, 0, 0, 2, 2]
    """
    return PartitionIndices.concat(
        [own.get(client, np.empty(0, np.int64)) for client in range(count)]
    )


def _build_from_files(
    site: SiteFile, config: Experiment, expected: Mapping[str, Any], count: int
) -> BuiltExperiment:
    if config.drift.schedule:
        raise Declined(
            "setup",
            "the experiment simulates drift, but this site has data of its own: drift works on"
            " shares of published data",
        )
    datasets = {client: read_client(site, config, client, expected) for client in site.clients}
    dataset = join_datasets(list(datasets.values()))
    data = {"name": site.settings.name, "partition": "by_group", "public": 0}
    local = config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "clients": config.clients.model_copy(update={"count": None, "sample": None}),
            "round": config.round.model_copy(update={"min_replies": 1}),
        }
    )
    method = Method(tuple(_client_side(p) for p in parse_method(config.method, PARTS).parts))
    experiment = build(local, method=method, source=dataset, own=len(site.clients))
    task = experiment.task
    population = _renumber(task.population.at(0), dataset, list(datasets), count)
    task = replace(task, population=population, info=replace(task.info, num_clients=count))
    if config.data.normalize is True and expected.get("std"):
        task = _normalize_with(task, dataset, expected)
    return replace(experiment, task=task)


def _renumber(
    built: ClientData, dataset: ArrayDataset, clients: Sequence[int], count: int
) -> FederatedPopulation:
    """The site's clients under their numbers in the federation; each has its own test examples."""

    def by_client(indices: PartitionIndices) -> PartitionIndices:
        own = {client: indices.for_client(group) for group, client in enumerate(clients)}
        return spread(own, count)

    groups = dataset.test.groups
    tests = {client: np.flatnonzero(groups == group) for group, client in enumerate(clients)}
    one_cluster = np.zeros(count, dtype=np.int64)
    return FederatedPopulation(
        (ClientData(by_client(built.train), by_client(built.valid), one_cluster),),
        tuple(tests.get(client, np.empty(0, np.int64)) for client in range(count)),
    )


def _normalize_with(
    task: TrainingTask, dataset: ArrayDataset, expected: Mapping[str, Any]
) -> TrainingTask:
    """Normalize with the coordinator's mean and standard deviation."""
    shape = (-1, *(1,) * (len(dataset.shape) - 1))
    statistics: dict[str, Any] = {
        name: torch.tensor(expected[name], dtype=torch.float64)
        .to(task.info.dtype)
        .reshape(shape)
        .to(task.info.device)
        for name in ("mean", "std")
    }
    return replace(
        task, train=replace(task.train, **statistics), test=replace(task.test, **statistics)
    )


def _client_side(p: Part) -> Part:
    """A part without its server functions, which may need data that a site does not have."""
    unset: dict[str, Any] = dict.fromkeys(NOT_AT_SITES)
    return replace(p, needs_public_data=False, **unset)
