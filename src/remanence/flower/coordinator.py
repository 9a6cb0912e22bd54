"""An experiment on a federation: the round loop of `rounds/loop.py` with the engine `flower`, started or
taken up where it stopped.

The coordinator has the model, the method and its server state; of the data it knows what sites
tell. The same call goes on with a run that was cut off: sites kept the state of their clients, and
a round that comes again gets the replies it got.
"""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from remanence.config import Experiment, write_toml
from remanence.core import expressions
from remanence.core.compose import ComposedMethod
from remanence.core.errors import InputError, RunFailed
from remanence.core.files import create_output_dir, lock, translate_disk_errors, write_atomically
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import Progress
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.experiment.build import BuiltExperiment, build
from remanence.flower.data_description import Description, describe_data
from remanence.flower.engine import FlowerEngine
from remanence.flower.node_registry import NodeRegistry, RemotePopulation
from remanence.flower.secure_noise import secret_noise
from remanence.flower.session import RealDeadline, Session, Timeouts, activate
from remanence.flower.transport import Transport
from remanence.flower.wire import WireMessage
from remanence.results.checkpoint import fingerprint
from remanence.results.run import COMPARISON, METADATA, SPEC, Run
from remanence.rounds.loop import TimeLimit, train

LOG = "federation.log"  # what happened, a line each
RUN_NAME = "federation"  # in `about`: the name under which sites keep what belongs to this run
SIMULATION_ONLY = {  # what an experiment may simulate, and a federation has for real
    "attack": ("", "hostile sites are not simulated in a real federation"),
    "clients.availability": ("always", "real sites are there or not"),
    "clients.speed": ("equal", "real sites have a speed of their own"),
    "round.late": ("discard", "late answers of real sites are not used"),
    "record.examples": (False, "what models say of single examples never leaves a site"),
}


@preserve_process_state()
def run_experiment(
    spec: Experiment, out: Path, carrier: Transport, patience: Timeouts, progress: Progress
) -> Run:
    """Start a run on the sites behind `carrier`, or go on with the one in that folder."""
    spec = check_deployable(spec)
    experiment, description = build_coordinator(spec)
    task = experiment.task
    found = _find(out, experiment.config)
    name = str(uuid.uuid4()) if found is None else found
    if found is None:
        create_output_dir(out, False, (SPEC, COMPARISON))
    say = make_log(out / LOG, progress.log)
    preamble = {
        "run": name,
        "spec": describe_spec(experiment.config),
        "data": describe_examples(experiment, description),
    }

    def write_down(told: BuiltExperiment) -> None:
        known = told.metadata | {"engine": "flower: real sites", RUN_NAME: name}
        write_atomically(out / SPEC, write_toml(told.config, {METADATA: known}).encode())

    with translate_disk_errors(out), lock(out):
        if found is None:
            # so that even the wait for sites can be cut off
            write_down(replace(experiment, metadata=experiment.metadata | {"label_counts": []}))
        say(
            f"{'new run' if found is None else 'going on with run'} {name}: {spec.method},"
            f" {task.info.num_clients} clients"
        )
        roster = NodeRegistry(
            carrier, WireMessage({**preamble, "kind": "hello"}, {}), task.info.num_clients, say
        )
        gather(roster, patience)
        remote = bind_to_sites(experiment, roster, description, patience)
        write_down(remote)
        session = Session(
            roster=roster,
            preamble=preamble,
            timeouts=patience,
            log=say,
            wanted=remote.cohort_size if spec.round.over_selection > 1 else 0,
            deadline=parse_real_deadline(spec.round.deadline),
            has_test=description is None,
        )
        with activate(session):
            run = train(
                remote,
                out,
                progress,
                TimeLimit(None),
                engine_for=lambda experiment: FlowerEngine(experiment.task),
            )
        say(notify_end(session, carrier, spec.total_rounds))
    return run


def notify_end(session: Session, carrier: Transport, rounds: int) -> str:
    """What it took, so that one can see what a federation costs beside the work itself."""
    if not session.spent:
        return f"done: {rounds} rounds"
    took, worked = (statistics.median(column) for column in zip(*session.spent, strict=True))
    travelled = (
        f"{carrier.sent_bytes} bytes of arrays went to sites and {carrier.received_bytes} came back"
    )
    return (
        f"done: {rounds} rounds; {travelled}; an answer took {took:.1f} s (median), of which"
        f" its site worked {worked:.2f} s"
    )


def check_deployable(spec: Experiment) -> Experiment:
    """Refuse what only a simulation can do; a checkpoint follows every round, because a round
    of a federation is dear.
    """
    flat = spec.model_dump()
    for key, (allowed, reason) in SIMULATION_ONLY.items():
        section, _, name = key.rpartition(".")
        value = (flat[section] if section else flat)[name]
        if value != allowed:
            raise InputError(
                f"{key}={value!r} cannot be used with the engine flower ({reason}): leave it out"
            )
    parts = build_method(spec)
    personal = next(
        (p.name for p in parts if p.personal is not None),
        "local.buffers=local" if spec.local.buffers == "local" else "",
    )
    peers = next(
        (p.name for p in parts if p.peers is not None), "record.local" if spec.record.local else ""
    )
    if personal and peers:
        raise InputError(
            f"{peers} needs whole models of clients, and with {personal} a part of them"
            " never leaves its site: leave one of them out"
        )
    if spec.engine not in ("auto", "flower"):
        raise InputError(
            f'engine={spec.engine!r} in a Flower app: write engine = "flower", or leave it'
            " out; a site's own engine is in its site.toml"
        )
    return spec.model_copy(
        update={"engine": "flower", "checkpoint": spec.checkpoint.model_copy(update={"seconds": 0})}
    )


def build_coordinator(spec: Experiment) -> tuple[BuiltExperiment, Description | None]:
    """The coordinator's side of an experiment: with data of its own, or with a description of
    what the sites have.
    """
    description = describe_data(spec)
    if description is None:
        return build(spec), None
    if any(p.needs_public_data for p in build_method(spec)) or spec.data.public:
        raise InputError(
            "the coordinator has no data (data sites), so it has no public set either:"
            " name its data, or use a method that needs none"
        )
    even = spec.model_copy(
        update={"data": spec.data.model_copy(update={"partition": "iid", "validation": 0.0})}
    )
    experiment = build(even, source=description.source)
    settled = experiment.config.model_copy(update={"data": spec.data})
    shape = "x".join(map(str, description.source.shape))
    told = (
        f"at the sites: {description.source.kind} examples of shape {shape},"
        f" {len(description.source.classes)} classes"
    )
    about = experiment.metadata | {
        "data": told,
        "mean": list(description.mean),
        "std": list(description.std),
    }
    return replace(experiment, config=settled, metadata=about), description


def build_method(spec: Experiment) -> tuple[Part, ...]:
    from remanence.core.compose import parse_method
    from remanence.methods import PARTS

    return parse_method(spec.method, PARTS).parts


def describe_spec(spec: Experiment) -> dict[str, Any]:
    """What of an experiment sites are told: everything but where things lie at the coordinator
    and what is none of their business.
    """
    told = spec.model_dump(mode="json")
    for name in (
        "device",
        "threads",
        "workers",
        "rounds",
        "checkpoint",
        "record",
        "engine",
        "stack",
        "execution",
        "timeout",
        "ray",
    ):
        told.pop(name, None)
    told["data"].pop("dir")
    return _without_none(told)


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }


def describe_examples(
    experiment: BuiltExperiment, description: Description | None
) -> dict[str, Any]:
    """What examples look like: sites with data of their own must agree with it."""
    source, about = experiment.dataset, experiment.metadata
    return {
        "classes": list(source.classes),
        "shape": list(source.shape),
        "kind": source.kind,
        "mean": about["mean"],
        "std": about["std"],
    }


def gather(roster: NodeRegistry, patience: Timeouts) -> None:
    """Wait until all clients are there, or for as long as was said; some at least must come."""
    everybody = roster.wait_until(
        lambda: bool((roster.present() | _declined_sites(roster)).all()), patience.join_timeout
    )
    there = roster.present()
    if not there.any():
        reasons = "; ".join(
            sorted(
                {
                    ": ".join(node.declined)
                    for node in roster.nodes.values()
                    if node.declined is not None
                }
            )
        )
        why = (
            f"those that came declined ({reasons})"
            if reasons
            else "check that the SuperNodes run and reach this SuperLink"
        )
        raise RunFailed(
            f"no site can work on this experiment after {patience.join_timeout:g} s: {why}; then"
            " flwr run again goes on"
        )
    if not everybody:
        away = ", ".join(map(str, np.flatnonzero(~there).tolist()))
        roster.say(
            f"after {patience.join_timeout:g} s clients {away} have not come: starting without them"
        )


def _declined_sites(roster: NodeRegistry) -> np.ndarray:
    mask = np.zeros(roster.count, dtype=bool)
    mask[list(roster.declined())] = True
    return mask


def bind_to_sites(
    experiment: BuiltExperiment,
    roster: NodeRegistry,
    description: Description | None,
    patience: Timeouts,
) -> BuiltExperiment:
    """The experiment as a coordinator can run it: who is there is who can be asked, and how
    many rows they have is what they say.
    """
    task, spec = experiment.task, experiment.config
    own_data = description is not None or not all(
        node.shared for node in roster.nodes.values() if node.ready
    )
    if own_data and spec.drift.schedule:
        raise InputError(
            "drift is simulated on shares of known data, and some sites have data of their"
            " own: leave drift out"
        )
    population: Any = task.population
    if own_data:
        population = RemotePopulation(
            task.population.time_steps, task.population.test_ids, roster=roster
        )
    task = replace(
        task,
        clients_remote=True,
        population=population,
        method=ComposedMethod(Method(tuple(map(secret_noise, task.method.parts)))),
    )
    needed = max(1, spec.round.min_replies)

    def there(clients: int, round: int, key: Key) -> np.ndarray:
        """Who can be asked in a round; waits while there are too few for it."""
        roster.poll()
        if roster.present().sum() < needed:
            roster.say(
                f"round {round} waits: {int(roster.present().sum())} clients are there, and it"
                f" needs {needed}"
            )
        if not roster.wait_until(
            lambda: int(roster.present().sum()) >= needed, patience.join_timeout
        ):
            raise RunFailed(
                f"fewer than {needed} clients were there for {patience.join_timeout:g} s in"
                f" round {round}: all rounds before are saved;"
                " flwr run again goes on when the sites are back"
            )
        return roster.present()

    # nobody's labels are known here
    about = experiment.metadata | ({"label_counts": []} if own_data else {})
    return replace(experiment, task=task, availability=there, metadata=about)


def parse_real_deadline(text: str) -> RealDeadline:
    """`round.deadline` in real seconds.

    >>> parse_real_deadline("30").seconds, parse_real_deadline("quantile(share=0.8)").share
    (30.0, 0.8)
    """
    try:
        return RealDeadline(seconds=float(text))
    except ValueError:
        call = expressions.parse_call(text)
    given = call.arguments
    if call.name == "quantile":
        return RealDeadline(share=float(given.get("share", 0.8)))
    return (
        RealDeadline(seconds=float(given["seconds"]))
        if call.name == "after"
        else RealDeadline(seconds=math.inf)
    )


def _find(out: Path, spec: Experiment) -> str | None:
    """The name of the run in that folder; None where there is none yet."""
    if not (out / SPEC).exists():
        return None
    run = Run(out)
    if fingerprint(run.config) != fingerprint(spec) or RUN_NAME not in run.metadata:
        raise InputError(
            f"{out} holds another experiment: choose another out in the app's"
            " pyproject.toml, or with flwr run -c 'out=\"...\"'"
        )
    if run.config.rounds > spec.rounds:
        raise InputError(
            f"{out} was meant to have {run.config.rounds} rounds: rounds={spec.rounds} cannot"
            " take any back"
        )
    return str(run.metadata[RUN_NAME])


def make_log(path: Path, tell: Callable[[str], None]) -> Callable[[str], None]:
    """What happens goes to people and into a file, with the time."""

    def say(text: str) -> None:
        line = " ".join(text.split())
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        tell(line)

    return say
