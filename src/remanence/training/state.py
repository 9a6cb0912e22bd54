"""The state of a run between two rounds, as one immutable value.

A run that stops at any point resumes from the last state that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.files import FilePrefix
from remanence.core.pytree import Tree
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.training.server_step import Server
from remanence.training.task import PERSONAL, TrainingTask

REMOTE = "site"  # key in the state of a client that keeps its own state on its own machine
NO_STATE = -1  # the round of a state that does not exist yet


@dataclass(frozen=True)
class ClientModels:
    """The clients' models where there is no server. Every tensor has the K clients as leading
    axis.

    Args:
        models: The current models.
        best: The models with the lowest validation loss since the client's data changed; these
            are evaluated.
        best_loss: [K] float64, infinity before the first validation.
        rounds_since_best: [K] int64, rounds without a lower loss.
        early_stopped: [K] bool. Such a client does not train until its data change.
        valid_accuracy: [K] float64, of the current models on their clients' validation examples;
            -1 until a client takes part in the time step, and for one without such examples.
        peers: The state of the peer selection, by part.
        peer_counts: [K, K] int64, how often client k used the model of j since the counts were
            last written.
    """

    models: ModelState
    best: ModelState
    best_loss: Tensor
    rounds_since_best: Tensor
    early_stopped: Tensor
    valid_accuracy: Tensor
    peers: Tree
    peer_counts: Tensor


# the fields of `ClientModels` that are one table each
CLIENT_TABLES = (
    "best_loss",
    "rounds_since_best",
    "early_stopped",
    "valid_accuracy",
    "peer_counts",
)


class StaleReply(NamedTuple):
    """A late reply."""

    reply: Reply  # of one client
    base_model: ModelState  # the global model that the client started from
    arrival_round: int  # the round in which the reply arrives


@dataclass(frozen=True)
class RunState:
    """A run after `round` rounds.

    Args:
        round: The number of finished rounds.
        time_step: The time step of the last round.
        server: The server with its global model.
        client_states: The clients' states, by client and part. Only clients that took part have
            one.
        committed: The part of each append-only file that belongs to this state, by name.
        extra_servers: Further global models, where a method has several.
        model_of_client: [K] int64, the global model that each client uses; None if there is one.
        assignment_state: The state of the model assignment, by part.
        client_models: The clients' models, where there is no server.
        stale: Replies that arrive in later rounds.
    """

    round: int
    time_step: int
    server: Server
    client_states: Mapping[int, Tree]
    committed: Mapping[str, FilePrefix] = field(default_factory=dict)
    extra_servers: tuple[Server, ...] = ()
    model_of_client: Tensor | None = None
    assignment_state: Tree = field(default_factory=dict)
    client_models: ClientModels | None = None
    stale: tuple[StaleReply, ...] = ()

    @property
    def global_models(self) -> tuple[Server, ...]:
        """All global models with their servers' states."""
        return self.server, *self.extra_servers

    @property
    def models(self) -> ModelState:
        """The global models, stacked."""
        return ModelState.stack([server.model for server in self.global_models])

    def models_used_by(self, clients: np.ndarray) -> np.ndarray:
        """The number of the global model that each of these clients uses. -> [k] int64"""
        if self.model_of_client is None:
            return np.zeros(len(clients), dtype=np.int64)
        used: np.ndarray = self.model_of_client.numpy()[clients]
        return used

    def model_shares(self) -> np.ndarray:
        """The fraction of the clients that use each global model. -> [M]"""
        if self.model_of_client is None:
            return np.ones(1)
        used, models = self.model_of_client.numpy(), len(self.global_models)
        return np.asarray(np.bincount(used, minlength=models) / len(used))


def load_client_states(
    state: RunState, task: TrainingTask, clients: np.ndarray, stats: ClientStats
) -> Tree:
    """The states of these clients, stacked on the device. A new client gets its parts' initial
    state.

    Args:
        state: The state of the run.
        task: The run's task.
        clients: [k] client numbers.
        stats: The clients' statistics, stacked.
    """
    if not task.is_stateful or not len(clients):
        return {}
    if task.clients_remote:
        rounds = [
            int(state.client_states[client][REMOTE]["round"])
            if client in state.client_states
            else NO_STATE
            for client in clients.tolist()
        ]
        return {REMOTE: {"round": torch.tensor(rounds, device=task.info.device)}}
    loaded = []
    for position, client in enumerate(clients):
        client_state = state.client_states.get(int(client))
        if client_state is None:
            own_stats = ClientStats(*(values[position] for values in stats))
            client_state = _init_client_state(state.server.model, task, own_stats)
        # flattening drops empty branches, as a checkpoint does
        flat = pytree.flatten(client_state)
        loaded.append(pytree.to(pytree.unflatten(flat), task.info.device))
    return pytree.stack(loaded)


def _init_client_state(model: ModelState, task: TrainingTask, stats: ClientStats) -> Tree:
    """The state of a client that takes part for the first time."""
    by_part = {
        part.name: part.client_state(model, stats, task.info)
        for part in task.method.parts
        if part.client_state is not None
    }
    return {**by_part, PERSONAL: task.personal_state(model)}


def store_client_states(client_states: Mapping[int, Tree], replies: Reply) -> Mapping[int, Tree]:
    """The clients' states with those of the replies, on the host. The argument is not changed."""
    if not replies.client_state:
        return client_states
    on_host = pytree.to(replies.client_state, "cpu")
    changed = {
        int(client): pytree.clone(pytree.take(on_host, position))
        for position, client in enumerate(replies.client)
    }
    return {**client_states, **changed}
