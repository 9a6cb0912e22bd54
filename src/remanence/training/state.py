"""Everything that must survive a round, as one immutable value: a run can stop between any two
instructions and still know where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Tree
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.training.server_step import Server
from remanence.training.task import PERSONAL, TrainingTask

REMOTE = "site"  # in what is known of a client that keeps its state for itself
NO_STATE = -1  # the round of a state that is not there yet


@dataclass(frozen=True)
class ClientModels:
    """The clients' own models, where there is no server. All tensors have the K clients as
    leading axis.
    """

    models: ModelState
    # with the lowest validation loss since the client's data changed: the one that counts
    best: ModelState
    best_loss: Tensor  # [K] float64, infinity before the first validation
    rounds_since_best: Tensor  # [K] int64: rounds since then without a lower one
    early_stopped: Tensor  # [K] bool: waited too long; trains no more until its data change
    peers: Tree  # by part: what is remembered of peers
    peer_counts: Tensor  # [K, K] int64: how often k listened to j since it was last written down


class StaleReply(NamedTuple):
    """An answer that is still under way."""

    reply: Reply  # of one client
    base_model: ModelState  # the global model it began from
    arrival_round: int  # the round in which it comes


@dataclass(frozen=True)
class RunState:
    """Where a run stands after `round` rounds."""

    round: int
    time_step: int  # of that round
    server: Server
    client_states: Mapping[
        int, Tree
    ]  # by client, then by part; only clients that took part have any
    # lengths of the append-only files that belong to this state
    file_lengths: Mapping[str, int] = field(default_factory=dict)
    extra_servers: tuple[Server, ...] = ()  # more global models, where a method has several
    model_of_client: Tensor | None = (
        None  # [K] int64: which of them each client uses; None: there is one
    )
    assignment_state: Tree = field(
        default_factory=dict
    )  # by part: what is remembered of who uses which
    client_models: ClientModels | None = None  # where there is no server
    stale: tuple[StaleReply, ...] = ()  # answers that come in later rounds

    @property
    def global_models(self) -> tuple[Server, ...]:
        return self.server, *self.extra_servers

    @property
    def models(self) -> ModelState:
        """The global models as a stack."""
        return ModelState.stack([server.model for server in self.global_models])

    def models_used_by(self, clients: np.ndarray) -> np.ndarray:
        """Which global model each of these clients uses. -> [k] int64"""
        return (
            np.zeros(len(clients), dtype=np.int64)
            if self.model_of_client is None
            else self.model_of_client.numpy()[clients]
        )


def load_client_states(
    state: RunState, task: TrainingTask, clients: np.ndarray, facts: ClientStats
) -> Tree:
    """What these clients keep, as a stack on the device; a newcomer's first value comes from
    its parts.
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
    rows = []
    for place, client in enumerate(clients):
        kept = state.client_states.get(int(client))
        if kept is None:
            mine = ClientStats(*(fact[place] for fact in facts))
            kept = {
                p.name: p.client_state(state.server.model, mine, task.info)
                for p in task.method.parts
                if p.client_state is not None
            }
            kept[PERSONAL] = task.personal_state(state.server.model)
        flat = pytree.flatten(kept)  # empty branches vanish, as they do in a checkpoint
        rows.append(pytree.to(pytree.unflatten(flat), task.info.device))
    return pytree.stack(rows)


def store_client_states(own: Mapping[int, Tree], replies: Reply) -> Mapping[int, Tree]:
    """The store with what these clients now keep, on the host; the old store is left as it is."""
    if not replies.client_state:
        return own
    on_host = pytree.to(replies.client_state, "cpu")
    changed = {
        int(client): pytree.clone(pytree.take(on_host, place))
        for place, client in enumerate(replies.client)
    }
    return {**own, **changed}
