"""Loads the data of an experiment, partitions them among the server, the clients and the time
steps, and lets attackers poison theirs.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from remanence import data
from remanence.attacks import Adversary, check_attacks, data_info, parse_attacks
from remanence.config import DEFAULT_PARTITION, Experiment
from remanence.core import expressions
from remanence.core.compose import ComposedMethod
from remanence.core.errors import InputError
from remanence.core.memory import limit_memory
from remanence.core.rng import Key
from remanence.data import drift_sampling
from remanence.data.concept_views import ConceptViews, make_views
from remanence.data.concepts import describe_concept, make_concepts
from remanence.data.dataset import ArrayDataset, limit_examples
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.data.naming import parse_data
from remanence.data.population import (
    ClientData,
    FederatedPopulation,
    PartitionIndices,
)
from remanence.data.splits import split_train_valid
from remanence.experiment.resources import RunSizes, check_resources, estimate_resources

DEFAULT_CLIENTS = 10


def load_data(config: Experiment) -> ArrayDataset:
    """Load the data that the settings name, with at most as many examples as they allow."""
    call = parse_data(config.data.name, data.DATASETS)
    texts = [value for value in call.arguments.values() if isinstance(value, str)]
    directory = config.data.dir or os.environ.get("REMANENCE_DATA", "")
    limits = config.data.limit, config.data.test_limit
    with limit_memory(config.data.max_bytes):
        versions = tuple(map(_file_versions, texts))
        return _load(config.data.name, directory, limits, versions)


@functools.lru_cache(maxsize=1)
def _load(
    name: str, directory: str, limits: tuple[int, int], versions: tuple[Any, ...]
) -> ArrayDataset:
    """The last dataset stays in memory, for all runs of a comparison, until its files change."""
    call = parse_data(name, data.DATASETS)
    root = Path(directory) if directory else None
    return limit_examples(data.load_dataset(call.name, call.arguments, root), *limits)


def _file_versions(path: str) -> tuple[Any, ...]:
    """Path, time and size of a file, or of everything in a folder; () for any other text."""
    try:
        root = Path(path).expanduser()
        files = sorted(root.iterdir()) if root.is_dir() else [root]
        states = [(file.resolve(), file.stat()) for file in files]
        return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)
    except (OSError, ValueError, RuntimeError):  # no path, or one that cannot be read
        return ()


def select_attackers(
    config: Experiment,
    method: ComposedMethod,
    dataset: ArrayDataset,
    federated: FederatedData,
    key: Key,
) -> tuple[Adversary, FederatedData]:
    """Select the attackers and poison their data; none where the settings name no attack."""
    attacks = parse_attacks(config.attack)
    central = next((p.name for p in method.parts if p.centralized), "")
    if attacks and central:
        raise InputError(f"{central} has no clients that could be hostile: leave out --attack")
    known = data_info(dataset)
    check_attacks(attacks, known, dataset.shape, method.has_server)
    adversary = Adversary.select(attacks, federated.population.num_clients, key)
    views, steps = adversary.poison(federated.train, federated.population.time_steps, known, key)
    return adversary, replace(
        federated, train=views, population=replace(federated.population, time_steps=tuple(steps))
    )


@dataclass(frozen=True)
class FederatedData:
    """The examples of the server and the clients at every time step."""

    public: np.ndarray  # examples of the server
    population: FederatedPopulation
    train: ConceptViews
    test: ConceptViews
    concepts: tuple[str, ...] = ()  # descriptions; none without drift
    notes: tuple[str, ...] = ()  # for users


def site_names(dataset: ArrayDataset, federated: FederatedData) -> list[str]:
    """The site of each client, by number; none where clients are not single sites."""
    groups, clients = dataset.train.groups, federated.population.at(0).train
    if not dataset.by_site or groups is None or len(clients.sizes) > len(dataset.group_names):
        return []
    names = []
    for client in range(len(clients.sizes)):
        # ids beyond the data are changed forms of its examples
        found = np.unique(groups[clients.for_client(client) % len(groups)])
        if len(found) != 1:
            return []
        names.append(dataset.group_names[found[0]])
    return names


def population_sizes(config: Experiment, dataset: ArrayDataset) -> RunSizes:
    """The sizes of a run that its data and clients determine."""
    clients, samples = config.clients.count or DEFAULT_CLIENTS, config.drift.samples
    if dataset.by_site and not config.data.partition:
        clients = config.clients.count or len(dataset.group_names)
    if not config.drift.schedule:  # a partition refuses more clients than examples
        clients = min(clients, len(dataset.train))
        samples = len(dataset.train) // clients
    return RunSizes(
        clients=clients,
        cohort=clients,
        rounds=config.total_rounds,
        time_steps=config.drift.time_steps,
        classes=len(dataset.classes),
        samples=max(1, samples),
        data=dataset.train.x.nbytes + dataset.test.x.nbytes,
    )


def partition_data(config: Experiment, dataset: ArrayDataset, key: Key) -> FederatedData:
    """Partition the training examples among the server and the clients, at every time step."""
    labels = dataset.train.y
    rows = np.arange(len(labels))
    public = np.empty(0, dtype=np.int64)
    if config.data.public:
        public, rows = data.hold_out(rows, labels, config.data.public, key.fold_in("public"))
    if config.drift.schedule:
        return _partition_over_time(config, dataset, public, rows, key)
    client_data = split_train_valid(
        _partition(config, dataset, rows, key), float(config.data.validation), key
    )
    everything = (np.arange(len(dataset.test)),)
    train, test = (
        ConceptViews(split.x, split.y, None, (0,)) for split in (dataset.train, dataset.test)
    )
    return FederatedData(public, FederatedPopulation((client_data,), everything), train, test)


def partition_text(config: Experiment, dataset: ArrayDataset) -> str:
    """The partition, or the default for these data: each site is a client."""
    return config.data.partition or ("by_group" if dataset.by_site else DEFAULT_PARTITION)


def _partition(
    config: Experiment, dataset: ArrayDataset, rows: np.ndarray, key: Key
) -> list[np.ndarray]:
    """The examples of every client by data.partition."""
    labels, groups = dataset.train.y, dataset.train.groups
    call = expressions.parse_call(partition_text(config, dataset))
    partition = expressions.instantiate(call, data.PARTITIONS, "partition")
    count = (
        config.clients.count
        if config.clients.count is not None or call.name in ("by_group", "label_clusters")
        else DEFAULT_CLIENTS
    )
    parts = partition(
        labels[rows],
        None if groups is None else groups[rows],
        count,
        len(dataset.classes),
        key.fold_in("partition"),
    )
    return [rows[part] for part in parts]


def _partition_over_time(
    config: Experiment, dataset: ArrayDataset, public: np.ndarray, rows: np.ndarray, key: Key
) -> FederatedData:
    """Partition data that drift: the schedule assigns clients to clusters at every time step, the
    concepts define the data of each cluster.
    """
    valid = float(config.data.validation)
    drift, call = config.drift, expressions.parse_call(config.drift.schedule)
    schedule = expressions.instantiate(call, DRIFT_SCHEDULES, "drift")
    concepts = make_concepts(drift.concepts, schedule.clusters, dataset)
    if drift.source == "partition":
        kept = split_train_valid(_partition(config, dataset, rows, key), valid, key)
        clients = len(kept.train.sizes)
        assignment = schedule(clients, drift.time_steps, key.fold_in("drift"))
        trained, validated = (
            [part.for_client(client) for client in range(clients)]
            for part in (kept.train, kept.valid)
        )
        dealt = drift_sampling.keep_partition(
            assignment, concepts, trained, validated, len(dataset.train)
        )
    else:
        assignment = schedule(
            config.clients.count or schedule.clients or DEFAULT_CLIENTS,
            drift.time_steps,
            key.fold_in("drift"),
        )
        dealt = drift_sampling.sample_examples(
            assignment,
            concepts,
            dataset.train,
            rows,
            drift.samples,
            drift.validation or valid,
            drift.resample or schedule.resample,
            key.fold_in("drift"),
        )
    steps = tuple(
        ClientData(
            PartitionIndices.concat(train),
            PartitionIndices.concat(valid),
            clusters.astype(np.int64),
        )
        for train, valid, clusters in zip(dealt.train, dealt.valid, assignment, strict=True)
    )
    tests = drift_sampling.concept_test_ids(concepts, dataset.test)
    train = make_views(
        dataset.train,
        concepts,
        [ids for step in steps for ids in (step.train.ids, step.valid.ids)],
        "train",
    )
    test = make_views(dataset.test, concepts, tests, "test")
    words = tuple(describe_concept(concept, dataset) for concept in concepts)
    return FederatedData(
        public, FederatedPopulation(steps, tuple(tests)), train, test, words, tuple(dealt.reused)
    )


@dataclass(frozen=True)
class PartitionTable:
    """The examples of each class that each client has, at time step 0."""

    title: str
    classes: list[str]
    label_counts: np.ndarray  # [clients, C]
    validation: list[int]  # examples kept for validation, by client
    public: int  # examples held out for the server
    clusters: list[list[int]]  # [time steps][clients]; empty without drift
    concepts: list[str]  # descriptions, by cluster
    notes: list[str]
    names: list[str] = field(default_factory=list)  # of the clients, where they are sites

    def to_json(self) -> dict[str, Any]:
        """The table as JSON; the entries about drift only where there is drift."""
        found: dict[str, Any] = {
            "classes": self.classes,
            "label_counts": self.label_counts.tolist(),
            "validation": self.validation,
            "public": self.public,
        }
        if self.names:
            found["clients"] = self.names
        if self.clusters:
            found |= {"clusters": self.clusters, "concepts": self.concepts, "notes": self.notes}
        return found


def tabulate_partition(config: Experiment) -> PartitionTable:
    """Count the examples of each class that each client of an experiment has."""
    source = load_data(config)
    check_resources(estimate_resources(population_sizes(config, source)))
    partition = partition_data(config, source, Key(config.seed))
    population = partition.population
    drifts = bool(config.drift.schedule)
    clients = population.at(0)
    counts = clients.label_counts(
        np.arange(population.num_clients), partition.train.y, len(source.classes)
    )
    return PartitionTable(
        title=f"{source.name}, {config.drift.schedule or partition_text(config, source)}",
        classes=list(source.classes),
        label_counts=counts,
        validation=clients.valid.sizes.tolist(),
        public=len(partition.public),
        clusters=[step.cluster.tolist() for step in population.time_steps] if drifts else [],
        concepts=list(partition.concepts),
        notes=list(partition.notes),
        names=site_names(source, partition),
    )
