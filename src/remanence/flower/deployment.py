"""An experiment for real sites: checks that a federation can run it, the coordinator's side of it,
and the settings that sites receive.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from remanence.config import Experiment, parse_experiment
from remanence.core import expressions
from remanence.core.compose import ComposedMethod, parse_method
from remanence.core.errors import InputError, RunFailed
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.experiment.build import BuiltExperiment, build
from remanence.experiment.system import DEADLINES
from remanence.flower.data_description import NAME, Description, describe_data
from remanence.flower.experiment_check import NamesFileOrCode, check_experiment
from remanence.flower.node_registry import NodeRegistry, RemotePopulation
from remanence.flower.secure_noise import secret_noise
from remanence.flower.session import RealDeadline, Timeouts
from remanence.flower.site_data import is_published
from remanence.methods import PARTS

SIMULATION_ONLY = {  # key: the only value a federation accepts, and the reason
    "attack": ("", "hostile sites are not simulated in a real federation"),
    "clients.availability": ("always", "real sites are available or not"),
    "clients.speed": ("equal", "real sites have their own speed"),
    "round.late": ("discard", "late replies of real sites are not used"),
    "record.examples": (False, "predictions for single examples never leave a site"),
}
# keys that sites do not receive: they concern the coordinator alone
COORDINATOR_KEYS = (
    "device",
    "threads",
    "workers",
    "rounds",
    "checkpoint",
    "record",
    "engine",
    "stack_size",
    "execution",
    "timeout",
    "ray",
    "peers",
)


def check_deployable(config: Experiment) -> Experiment:
    """Reject what only a simulation can do.

    Returns:
        The experiment for engine `flower`, with a checkpoint after every round, because rounds of a
        federation are expensive.
    """
    flat = config.model_dump()
    for key, (allowed, reason) in SIMULATION_ONLY.items():
        section, _, name = key.rpartition(".")
        value = (flat[section] if section else flat)[name]
        if value != allowed:
            raise InputError(
                f"{key}={value!r} cannot be used with the engine flower ({reason}): leave it out"
            )
    parts = method_parts(config)
    personal = next(
        (p.name for p in parts if p.personal is not None),
        "local.buffers=local" if config.local.buffers == "local" else "",
    )
    peers = next(
        (p.name for p in parts if p.peers is not None),
        "record.local" if config.record.local else "",
    )
    if personal and peers:
        raise InputError(
            f"{peers} needs whole models of clients, and with {personal} a part of them"
            " never leaves its site: leave one of them out"
        )
    if config.engine not in ("auto", "flower"):
        raise InputError(
            f'engine={config.engine!r} in a Flower app: write engine = "flower", or leave it'
            " out; a site's own engine is in its site.toml"
        )
    try:
        check_experiment(parse_experiment(site_config(config)), allow_code=True)
    except NamesFileOrCode as error:
        raise InputError(f"sites would decline this experiment: {error}") from None
    every_round = config.checkpoint.model_copy(update={"seconds": 0})
    return config.model_copy(update={"engine": "flower", "checkpoint": every_round})


def method_parts(config: Experiment) -> tuple[Part, ...]:
    return parse_method(config.method, PARTS).parts


def build_coordinator(config: Experiment) -> tuple[BuiltExperiment, Description | None]:
    """Build the coordinator's side of an experiment.

    Returns:
        The experiment; and the description of the sites' examples, where the coordinator has no
        data of its own.
    """
    description = describe_data(config)
    if description is None:
        return build(config), None
    if any(p.needs_public_data for p in method_parts(config)) or config.data.public:
        raise InputError(
            "the coordinator has no data (data sites), so it has no public set either:"
            " name its data, or use a method that needs none"
        )
    if config.data.limit or config.data.test_limit:
        raise InputError(
            "data.limit and data.test_limit are for data of the coordinator, and it has none: leave"
            " them out, and give every site the examples it shall use"
        )
    # placeholder examples, divided evenly
    even = config.data.model_copy(update={"partition": "iid", "validation": 0.0})
    experiment = build(config.model_copy(update={"data": even}), source=description.source)
    resolved = experiment.config.model_copy(update={"data": config.data})
    source = description.source
    shape = "x".join(map(str, source.shape))
    text = f"at the sites: {source.kind} examples of shape {shape}, {len(source.classes)} classes"
    metadata = experiment.metadata | {
        "data": text,
        "mean": list(description.mean),
        "std": list(description.std),
    }
    return replace(experiment, config=resolved, metadata=metadata), description


def site_config(config: Experiment) -> dict[str, Any]:
    """The experiment as sites receive it: without the settings and files of the coordinator."""
    tree = config.model_dump(mode="json")
    for key in COORDINATOR_KEYS:
        tree.pop(key, None)
    for key in ("dir", "max_bytes"):
        tree["data"].pop(key)
    if not is_published(config.data.name):  # sites have data of their own
        tree["data"]["name"] = NAME
    return _without_none(tree)


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }


def describe_examples(experiment: BuiltExperiment) -> dict[str, Any]:
    """Classes, shape, kind and statistics, with which sites' own data must agree."""
    dataset, metadata = experiment.dataset, experiment.metadata
    return {
        "classes": list(dataset.classes),
        "shape": list(dataset.shape),
        "kind": dataset.kind,
        "mean": metadata["mean"],
        "std": metadata["std"],
    }


def bind_to_sites(
    experiment: BuiltExperiment,
    registry: NodeRegistry,
    description: Description | None,
    timeouts: Timeouts,
) -> BuiltExperiment:
    """Connect the coordinator's experiment to the sites: available clients are sampled, and their
    numbers of examples are those that sites report.
    """
    task, config = experiment.task, experiment.config
    own_data = description is not None or not all(
        node.simulated for node in registry.nodes.values() if node.ready
    )
    if own_data and config.drift.schedule:
        raise InputError(
            "drift is simulated on shares of known data, and some sites have data of their"
            " own: leave drift out"
        )
    population: Any = task.population
    if own_data:
        population = RemotePopulation(population.time_steps, population.test_ids, registry=registry)
    task = replace(
        task,
        clients_remote=True,
        population=population,
        method=ComposedMethod(Method(tuple(map(secret_noise, task.method.parts)))),
    )
    needed = max(1, config.round.min_replies)

    def availability(clients: np.ndarray, total: int, round: int, key: Key) -> np.ndarray:
        """Which clients can be sampled in a round; waits while there are too few."""
        registry.poll()
        count = int(registry.available().sum())
        if count < needed:
            registry.log(f"round {round} waits: {count} clients are available, it needs {needed}")
        if not registry.wait_until(
            lambda: int(registry.available().sum()) >= needed, timeouts.join_timeout
        ):
            raise RunFailed(
                f"fewer than {needed} clients were available for {timeouts.join_timeout:g} s in"
                f" round {round}: all rounds before are saved;"
                " repeat flwr run when the sites are back"
            )
        return np.asarray(registry.available()[clients])

    # the coordinator does not know the sites' labels
    metadata = experiment.metadata | ({"label_counts": []} if own_data else {})
    return replace(experiment, task=task, availability=availability, metadata=metadata)


def parse_real_deadline(text: str) -> RealDeadline:
    """`round.deadline` in real seconds.

    >>> parse_real_deadline("30").seconds, parse_real_deadline("quantile(share=0.8)").share
    (30.0, 0.8)
    """
    try:
        return RealDeadline(seconds=float(text))
    except ValueError:
        call = expressions.parse_call(text)
    options = expressions.options_of(DEADLINES[call.name]) if call.name in DEADLINES else {}
    arguments = expressions.name_arguments(call, options, "deadline").arguments
    if call.name == "quantile":
        return RealDeadline(share=float(arguments.get("share", 0.8)))
    if call.name == "after":
        return RealDeadline(seconds=float(arguments["seconds"]))
    return RealDeadline(seconds=math.inf)
