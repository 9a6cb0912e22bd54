"""The kind of round that an experiment has, and the state before the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import Engine
from remanence.core.files import FilePrefix
from remanence.core.safe_path import SafePath
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.decentralized import DecentralizedRound, init_client_models
from remanence.rounds.federated import FederatedRound
from remanence.rounds.writer import RunWriter
from remanence.training import server_step
from remanence.training.state import RunState, load_client_states


class Round(Protocol):
    """A round of an experiment on an engine, with the files it writes."""

    writer: RunWriter
    engines: tuple[Engine, ...]  # those that train: clients and, if any, personal models

    def run(self, state: RunState) -> tuple[RunState, dict[str, Any]]:
        """Run one round -> the next state, and the round's line of metrics.jsonl."""
        ...

    def close(self) -> None:
        """Close the files; the engine stays open."""
        ...


def make_round(
    experiment: BuiltExperiment,
    engine: Engine,
    folder: Path | SafePath,
    committed: Mapping[str, FilePrefix] | None = None,
) -> Round:
    """The round of an experiment: with a server or without one.

    Args:
        experiment: Of the run.
        engine: Trains and evaluates.
        folder: Of the run.
        committed: The part of its append-only files that belongs to the last checkpoint; everything
            beyond is cut off.
    """
    writer = RunWriter(SafePath.of(folder), experiment, committed)
    if experiment.is_decentralized:
        return DecentralizedRound(experiment, engine, writer)
    return FederatedRound(experiment, engine, writer)


def first_state(experiment: BuiltExperiment) -> RunState:
    """The state before the first round."""
    task = experiment.task
    state = RunState(round=0, time_step=0, server=server_step.init_server(task), client_states={})
    if experiment.is_decentralized:
        state = replace(state, client_models=init_client_models(task))
    part = task.method.part_filling("model_assignment")
    if part is None or part.model_assignment is None:
        return state
    return replace(
        state,
        model_of_client=torch.zeros(task.info.num_clients, dtype=torch.int64),
        assignment_state={part.name: part.model_assignment.init(task.info)},
    )


def state_schema(experiment: BuiltExperiment) -> RunState:
    """The first state with the state of one client: every state of the experiment has its form."""
    state, client = first_state(experiment), np.zeros(1, dtype=np.int64)
    stats = experiment.client_stats(client, 0)
    kept = load_client_states(state, experiment.task, client, stats)
    return replace(state, client_states={0: pytree.take(kept, 0)} if kept else {})
