"""A site's own data as a task for an inner engine.

The task has all K clients of the experiment, so that a client has the same number everywhere, and
rows for those alone that live here. In trials the rows are what the experiment's partition gives
these clients, with the ids they have everywhere: a federation then gives what one machine would.
Real sites number their rows for themselves, and nobody else ever sees these numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from remanence.config import Experiment, is_import_path
from remanence.core.compose import parse_method
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.core.slots import Method, Part
from remanence.data import DATASETS, from_dataset
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.data.population import ClientData, FederatedPopulation, PartitionIndices
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.data_setup import load_data
from remanence.flower.policy import Declined
from remanence.flower.settings import SIMULATED_SHARE, SiteFile
from remanence.methods import PARTS
from remanence.training.task import TrainingTask

PUBLISHED = frozenset(DATASETS) - {"npz", "folder"}  # sources whose files are the same everywhere
AT_A_SERVER = (
    "client_weights",
    "aggregate",
    "server_update",
    "server_train",
    "update_server_state",
    "server_state",
    "broadcast",
    "model_assignment",
    "peers",
)


@dataclass(frozen=True)
class SiteTask:
    """Where a site works on one experiment: the task with its rows, and an engine for it."""

    experiment: BuiltExperiment
    engine: Engine
    shared: bool  # are the rows shares of the experiment's own data?

    @property
    def task(self) -> TrainingTask:
        return self.experiment.task

    def sizes(self, clients: Sequence[int]) -> dict[str, list[list[int]]]:
        """By client and time step: training and validation rows; and at the end of the list,
        rows of a test set of its own.
        """
        population = self.task.population
        tests = (
            [0] * population.num_clients
            if self.shared
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


def build_site_task(site: SiteFile, spec: Experiment, data: Mapping[str, Any]) -> SiteTask:
    """Read the site's data and build what an experiment needs here. data: what the coordinator
    says of examples: classes, shape, kind, mean, std
    """
    compute, clients = site.settings.compute, tuple(site.clients)
    count = spec.clients.count or 0
    foreign = next((client for client in clients if client >= count), None)
    if foreign is not None:
        raise Declined(
            "setup",
            f"this site has a client {foreign}, and the experiment's {count} clients are"
            f" numbered 0 to {count - 1}: change site.toml",
        )
    here = spec.model_copy(
        update={
            "device": compute.device,
            "threads": compute.threads,
            "engine": "sequential",
            "attack": "",
        }
    )
    shared = site.clients[clients[0]] == SIMULATED_SHARE
    experiment = (
        _build_simulated(here, clients) if shared else _build_from_files(site, here, data, count)
    )
    return SiteTask(experiment, make_inner(compute.engine, experiment.task, len(clients)), shared)


def make_inner(name: str, task: TrainingTask, clients: int) -> Engine:
    """The engine for a site's own clients: a stack where there are several and the model allows
    it.
    """
    if name != "sequential" and clients > 1:
        with contextlib.suppress(InputError):
            return make_engine("vectorized", task)
        if name == "vectorized":
            raise Declined(
                "setup",
                "compute.engine is stacked, and this model cannot be stacked on clients of"
                " different sizes: use auto",
            )
    return make_engine("sequential", task)


def _build_simulated(spec: Experiment, clients: Sequence[int]) -> BuiltExperiment:
    # a coordinator must not be able to make a site read its own files
    if spec.data.name.partition("(")[0].strip() not in PUBLISHED:
        raise Declined(
            "policy",
            "this site has shares of published data, and the experiment's data are"
            f" {spec.data.name!r}: name a published set",
        )
    experiment = build(spec)
    population = experiment.task.population
    steps = tuple(
        ClientData(_only(step.train, clients), _only(step.valid, clients), step.cluster)
        for step in population.time_steps
    )  # nobody here can touch the rows of others by mistake
    return replace(
        experiment, task=replace(experiment.task, population=replace(population, time_steps=steps))
    )


def _only(rows: PartitionIndices, clients: Sequence[int]) -> PartitionIndices:
    return spread({client: rows.for_client(client) for client in clients}, len(rows.sizes))


def spread(held: Mapping[int, np.ndarray], count: int) -> PartitionIndices:
    """The rows of some of `count` clients; the others have none.

    >>> spread({2: np.array([5, 6])}, 4).offsets.tolist()
    [0, 0, 0, 2, 2]
    """
    return PartitionIndices.concat(
        [held.get(client, np.empty(0, np.int64)) for client in range(count)]
    )


def _build_from_files(
    site: SiteFile, spec: Experiment, data: Mapping[str, Any], count: int
) -> BuiltExperiment:
    if spec.drift.schedule:
        raise Declined(
            "setup",
            "the experiment simulates drift, and this site has data of its own: drift is for"
            " shares of known data",
        )
    sources = {
        client: _read(site, spec, client, text, data) for client, text in site.clients.items()
    }
    source = _join(list(sources.values()), data)
    local = spec.model_copy(
        update={
            "data": spec.data.model_copy(
                update={"name": site.settings.name, "partition": "by_group", "public": 0}
            ),
            "clients": spec.clients.model_copy(update={"count": None, "sample": None}),
            "round": spec.round.model_copy(update={"min_replies": 1}),
        }
    )
    method = Method(tuple(_client_side(p) for p in parse_method(spec.method, PARTS).parts))
    experiment = build(local, method=method, source=source)
    task, held = experiment.task, experiment.task.population.at(0)
    train, valid = (
        {client: rows.for_client(place) for place, client in enumerate(sources)}
        for rows in (held.train, held.valid)
    )
    groups = source.test.groups
    tests = {client: np.flatnonzero(groups == place) for place, client in enumerate(sources)}
    nobody_differs = np.zeros(count, dtype=np.int64)
    population = FederatedPopulation(
        (ClientData(spread(train, count), spread(valid, count), nobody_differs),),
        # every client is tested on rows of its own
        tuple(tests.get(client, np.empty(0, np.int64)) for client in range(count)),
    )
    task = replace(task, population=population, info=replace(task.info, num_clients=count))
    if spec.data.normalize and data.get("std"):
        shape = (-1, *(1,) * (len(source.shape) - 1))
        mean, std = (
            torch.tensor(data[name], dtype=torch.float64).to(task.info.dtype).reshape(shape)
            for name in ("mean", "std")
        )
        known: dict[str, Any] = {
            "mean": mean.to(task.info.device),
            "std": std.to(task.info.device),
        }
        task = replace(task, train=replace(task.train, **known), test=replace(task.test, **known))
    return replace(experiment, task=task)


def _client_side(p: Part) -> Part:
    """What of a part happens at a client: the rest is the coordinator's, and may need what no
    single site has.
    """
    nothing: dict[str, Any] = dict.fromkeys(AT_A_SERVER)
    return replace(p, needs_public_data=False, **nothing)


def _read(
    site: SiteFile, spec: Experiment, client: int, text: str, data: Mapping[str, Any]
) -> ArrayDataset:
    """A client's data, with the experiment's classes."""
    if is_import_path(text):
        source = _call(site, client, text)
    else:
        source = load_data(
            spec.model_copy(
                update={
                    "data": spec.data.model_copy(
                        update={"name": text, "dir": str(site.path.parent)}
                    )
                }
            )
        )
    classes, shape = [str(name) for name in data["classes"]], tuple(data["shape"])
    if source.kind != data["kind"] or source.shape != shape:
        raise Declined(
            "data",
            f"client {client} has {source.kind} examples of shape {source.shape}, and the"
            f" experiment is about {data['kind']} of shape {shape}",
        )
    unknown = next((name for name in source.classes if name not in classes), None)
    if unknown is not None:
        raise Declined(
            "data",
            f"client {client} has a class {unknown!r}, and the experiment knows"
            f" {', '.join(classes)}",
        )
    label = np.array([classes.index(name) for name in source.classes], dtype=np.int64)
    train, test = (DatasetSplit(split.x, label[split.y]) for split in (source.train, source.test))
    return replace(source, classes=tuple(classes), train=train, test=test, group_names=())


def _call(site: SiteFile, client: int, text: str) -> ArrayDataset:
    """The user's function. It is the site's own file that names it, never the coordinator."""
    module, _, name = text.partition(":")
    here = str(site.path.parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made: Any = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(
            f"{site.path}: data.{client} = {text!r} cannot be called ({error}): name a"
            " function without arguments as package.module:function"
        ) from error
    return made if isinstance(made, ArrayDataset) else from_dataset(made, name=f"client {client}")


def _join(sources: Sequence[ArrayDataset], data: Mapping[str, Any]) -> ArrayDataset:
    """All rows of a site, a group for each of its clients."""

    def join(splits: Sequence[DatasetSplit]) -> DatasetSplit:
        groups = np.repeat(np.arange(len(splits)), [len(split) for split in splits])
        return DatasetSplit(
            np.concatenate([split.x for split in splits]),
            np.concatenate([split.y for split in splits]),
            groups,
        )

    train, test = (
        join([source.train for source in sources]),
        join([source.test for source in sources]),
    )
    names = tuple(str(place) for place in range(len(sources)))
    return ArrayDataset("site", sources[0].kind, sources[0].classes, train, test, group_names=names)
