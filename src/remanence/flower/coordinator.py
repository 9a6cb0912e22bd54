"""A run on a federation: the rounds of `rounds.loop` with the engine `flower`.

The coordinator holds the model, the method's server state and, if it has any, its own test and
public sets. The same call resumes a run that was interrupted: sites store their clients' states
and their last replies, so a repeated request gets the same reply.
"""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from remanence.config import Experiment, write_toml
from remanence.core.errors import InputError, RunFailed
from remanence.core.files import create_output_dir, lock, translate_disk_errors
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import Progress
from remanence.core.safe_path import SafePath
from remanence.experiment.build import BuiltExperiment
from remanence.flower.deployment import (
    bind_to_sites,
    build_coordinator,
    check_deployable,
    describe_examples,
    parse_real_deadline,
    site_config,
)
from remanence.flower.engine import FlowerEngine
from remanence.flower.node_registry import NodeRegistry
from remanence.flower.session import Session, Timeouts
from remanence.flower.transport import Transport
from remanence.flower.wire import WireMessage
from remanence.results.checkpoint import fingerprint
from remanence.results.run import COMPARISON, EXPERIMENT, METADATA, Run
from remanence.rounds.loop import train
from remanence.rounds.time_limit import TimeLimit

LOG = "federation.log"  # one line for each event
RUN_NAME = "federation"  # in the metadata: the name under which sites store this run's files


@preserve_process_state()
def run_experiment(
    config: Experiment, out: Path, transport: Transport, timeouts: Timeouts, progress: Progress
) -> Run:
    """Run an experiment on the connected sites, or resume the one in the folder.

    Args:
        config: The experiment.
        out: The run folder.
        transport: Reaches the sites.
        timeouts: How long to wait for sites.
        progress: Shows rounds and events.

    Returns:
        The finished run.
    """
    config = check_deployable(config)
    experiment, description = build_coordinator(config)
    existing = _find_run(out, experiment.config)
    name = str(uuid.uuid4()) if existing is None else existing
    if existing is None:
        create_output_dir(out, False, (EXPERIMENT, COMPARISON))
    log = make_log(SafePath(out) / LOG, progress.log)
    num_clients = experiment.task.info.num_clients
    common_header = {
        "run": name,
        "experiment": site_config(experiment.config),
        "examples": describe_examples(experiment),
    }
    with translate_disk_errors(out), lock(out):
        if existing is None:  # before the wait for sites, which may be interrupted
            no_labels = experiment.metadata | {"label_counts": []}
            _write_config(out, replace(experiment, metadata=no_labels), name)
        verb = "new run" if existing is None else "resuming run"
        log(f"{verb} {name}: {config.method}, {num_clients} clients")
        ping_message = WireMessage({**common_header, "kind": "ping"}, {})
        registry = NodeRegistry(transport, ping_message, num_clients, log)
        wait_for_clients(registry, timeouts)
        remote = bind_to_sites(experiment, registry, description, timeouts)
        _write_config(out, remote, name)
        session = Session(
            registry=registry,
            common_header=common_header,
            timeouts=timeouts,
            log=log,
            target_replies=remote.cohort_size if config.round.over_selection > 1 else 0,
            deadline=parse_real_deadline(config.round.deadline),
            has_test=description is None,
        )
        run = train(
            remote,
            out,
            progress,
            TimeLimit(None),
            engine_for=lambda bound: FlowerEngine(bound.task, session),
        )
        log(describe_cost(session, transport, config.total_rounds))
    return run


def _write_config(out: Path, experiment: BuiltExperiment, name: str) -> None:
    metadata = experiment.metadata | {"engine": "flower: real sites", RUN_NAME: name}
    content = write_toml(experiment.config, {METADATA: metadata})
    (SafePath(out) / EXPERIMENT).write(content.encode())


def _find_run(out: Path, config: Experiment) -> str | None:
    """The name of the run in a folder; None if there is none yet."""
    if not (SafePath(out) / EXPERIMENT).is_regular_file():
        return None
    run = Run(out)
    if fingerprint(run.config) != fingerprint(config) or RUN_NAME not in run.metadata:
        raise InputError(
            f"{out} holds another experiment: choose another out in the app's"
            " pyproject.toml, or with flwr run -c 'out=\"...\"'"
        )
    if run.config.rounds > config.rounds:
        raise InputError(
            f"{out} was started with {run.config.rounds} rounds: rounds={config.rounds} cannot"
            " remove any"
        )
    return str(run.metadata[RUN_NAME])


def wait_for_clients(registry: NodeRegistry, timeouts: Timeouts) -> None:
    """Wait until all clients are available or declined, or until the timeout; at least one must be
    available then.
    """

    def complete() -> bool:
        declined = np.zeros(registry.num_clients, dtype=bool)
        declined[list(registry.declined())] = True
        return bool((registry.available() | declined).all())

    in_time = registry.wait_until(complete, timeouts.join_timeout)
    available = registry.available()
    if not available.any():
        reasons = {": ".join(node.declined) for node in registry.nodes.values() if node.declined}
        why = (
            f"the connected ones declined ({'; '.join(sorted(reasons))})"
            if reasons
            else "check that the SuperNodes run and reach this SuperLink"
        )
        raise RunFailed(
            f"no site can work on this experiment after {timeouts.join_timeout:g} s: {why}; then"
            " repeat flwr run"
        )
    if not in_time:
        missing = ", ".join(map(str, np.flatnonzero(~available).tolist()))
        registry.log(
            f"after {timeouts.join_timeout:g} s clients {missing} have not joined: starting"
            " without them"
        )


def describe_cost(session: Session, transport: Transport, rounds: int) -> str:
    """A sentence on bytes and response times, so that the overhead of a federation is visible."""
    if not session.response_times:
        return f"done: {rounds} rounds"
    took = statistics.median(seconds for seconds, _ in session.response_times)
    known = [worked for _, worked in session.response_times if math.isfinite(worked)]
    work = f", of which its site worked {statistics.median(known):.2f} s" if known else ""
    return (
        f"done: {rounds} rounds; {transport.sent_bytes} bytes of arrays sent to sites,"
        f" {transport.received_bytes} received; a response took {took:.1f} s (median){work}"
    )


def make_log(path: SafePath, show: Callable[[str], None]) -> Callable[[str], None]:
    """A function that shows a sentence and appends it, with the time, to a file."""

    def log(text: str) -> None:
        line = " ".join(text.split())
        with path.append() as file:
            entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n"
            file.write(entry.encode(errors="replace"))
        show(line)

    return log
