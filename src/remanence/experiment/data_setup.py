"""Who holds what: the data a spec names, divided among the server, the clients and the time
steps, and what hostile clients make of their share.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from remanence import data
from remanence.attacks import Adversary, check_attacks, data_info, parse_attacks
from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.compose import ComposedMethod
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import drift_sampling
from remanence.data.concept_views import ConceptViews, make_views
from remanence.data.concepts import describe_concept, make_concepts
from remanence.data.dataset import ArrayDataset
from remanence.data.drift_schedules import DRIFT_SCHEDULES
from remanence.data.population import (
    ClientData,
    FederatedPopulation,
    PartitionIndices,
    split_train_valid,
)

DEFAULT_CLIENTS = 10


def load_data(spec: Experiment) -> ArrayDataset:
    """Read the data the spec names: a source with options, an .npz file or a folder of images."""
    return _load(spec.data.name, spec.data.dir or os.environ.get("REMANENCE_DATA", ""))


@functools.lru_cache(maxsize=1)
def _load(name: str, directory: str) -> ArrayDataset:
    """The last source stays in memory: a comparison uses it in every run."""
    root = Path(directory) if directory else None
    if "(" not in name and name.endswith(".npz"):
        call = expressions.Call("npz", {"path": name})
    elif "(" not in name and name not in data.DATASETS and Path(name).is_dir():
        call = expressions.Call("folder", {"path": str(Path(name).resolve())})
    else:
        call = expressions.parse_call(name)
    return data.load_dataset(call.name, call.arguments, root)


def select_attackers(
    spec: Experiment,
    method: ComposedMethod,
    source: ArrayDataset,
    division: FederatedData,
    key: Key,
) -> tuple[Adversary, FederatedData]:
    """Hostile clients, and the data as they have tampered with them; nobody and nothing where
    the spec names no attack.
    """
    attacks = parse_attacks(spec.attack)
    if attacks and any(p.centralized for p in method.parts):
        raise InputError("centralized has no clients that could be hostile: leave out --attack")
    known = data_info(source)
    check_attacks(attacks, known, source.shape, method.part_filling("peers") is None)
    adversary = Adversary.select(attacks, division.population.num_clients, key)
    views, steps = adversary.poison(division.train, division.population.time_steps, known, key)
    return adversary, replace(
        division, train=views, population=replace(division.population, time_steps=tuple(steps))
    )


@dataclass(frozen=True)
class FederatedData:
    """Who holds what over time, and the examples as their holders see them."""

    public: np.ndarray  # rows of the server
    population: FederatedPopulation
    train: ConceptViews
    test: ConceptViews
    concepts: tuple[str, ...] = ()  # in words; none where nothing drifts
    notes: tuple[str, ...] = ()  # what a user should know of it


def partition_data(spec: Experiment, source: ArrayDataset, key: Key) -> FederatedData:
    """Public rows of the server, and who holds the rest, at every time step."""
    labels = source.train.y
    rows = np.arange(len(labels))
    public = np.empty(0, dtype=np.int64)
    if spec.data.public:
        public, rows = data.hold_out(rows, labels, spec.data.public, key.fold_in("public"))
    if spec.drift.schedule:
        return _partition_over_time(spec, source, public, rows, key)
    holdings = split_train_valid(
        _partition(spec, source, rows, key), labels, float(spec.data.validation), key
    )
    everything = (np.arange(len(source.test)),)
    train, test = (
        ConceptViews(split.x, split.y, None, (0,)) for split in (source.train, source.test)
    )
    return FederatedData(public, FederatedPopulation((holdings,), everything), train, test)


def _partition(
    spec: Experiment, source: ArrayDataset, rows: np.ndarray, key: Key
) -> list[np.ndarray]:
    """The rows of every client by data.partition."""
    labels, groups = source.train.y, source.train.groups
    call = expressions.parse_call(spec.data.partition)
    partition = expressions.instantiate(call, data.PARTITIONS, "partition")
    count = (
        spec.clients.count
        if spec.clients.count is not None or call.name in ("by_group", "label_clusters")
        else DEFAULT_CLIENTS
    )
    parts = partition(
        labels[rows],
        None if groups is None else groups[rows],
        count,
        len(source.classes),
        key.fold_in("partition"),
    )
    return [rows[part] for part in parts]


def _partition_over_time(
    spec: Experiment, source: ArrayDataset, public: np.ndarray, rows: np.ndarray, key: Key
) -> FederatedData:
    """Drift: the schedule says who is in which cluster when, the concepts what a cluster's data
    are.
    """
    drift, call = spec.drift, expressions.parse_call(spec.drift.schedule)
    schedule = expressions.instantiate(call, DRIFT_SCHEDULES, "drift")
    concepts = make_concepts(drift.concepts, schedule.clusters, source)
    if drift.rows == "partition":
        kept = split_train_valid(
            _partition(spec, source, rows, key), source.train.y, float(spec.data.validation), key
        )
        clients = len(kept.train.sizes)
        assignment = schedule(clients, drift.time_steps, key.fold_in("drift"))
        trained, validated = (
            [part.for_client(client) for client in range(clients)]
            for part in (kept.train, kept.valid)
        )
        dealt = drift_sampling.keep_partition(
            assignment, concepts, trained, validated, len(source.train)
        )
    else:
        assignment = schedule(
            spec.clients.count or schedule.clients or DEFAULT_CLIENTS,
            drift.time_steps,
            key.fold_in("drift"),
        )
        renew = drift.resample or ("changed" if call.name in ("staggered", "table") else "everyone")
        valid = drift.validation or float(spec.data.validation)
        dealt = drift_sampling.sample_examples(
            assignment,
            concepts,
            source.train,
            rows,
            drift.samples,
            valid,
            renew,
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
    tests = drift_sampling.concept_test_ids(concepts, source.test)
    train = make_views(
        source.train,
        concepts,
        [ids for step in steps for ids in (step.train.ids, step.valid.ids)],
        "train",
    )
    test = make_views(source.test, concepts, tests, "test")
    words = tuple(describe_concept(concept, source) for concept in concepts)
    return FederatedData(
        public, FederatedPopulation(steps, tuple(tests)), train, test, words, tuple(dealt.reused)
    )
