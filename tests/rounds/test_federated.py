"""The steps of a round with a server, alone."""

from __future__ import annotations

import torch

from remanence.core.types import ModelState, Reply
from remanence.rounds.federated import _store_updates
from remanence.training.server_step import Server, ServerResult
from remanence.training.state import RunState


def server_at(value: float) -> Server:
    return Server(ModelState({"w": torch.tensor([value])}, {}), {})


def test_clients_of_a_model_whose_aggregation_failed_keep_their_state() -> None:
    # clients 0 and 2 use model 0, client 1 uses model 1; only model 0 was updated
    old = {client: {"part": {"h": torch.tensor(0.0)}} for client in (0, 1)}
    state = RunState(
        round=3,
        time_step=0,
        server=server_at(0.0),
        extra_servers=(server_at(10.0),),
        client_states=old,
        model_of_client=torch.tensor([0, 1, 0]),
    )
    replies = Reply(
        client=torch.tensor([2, 1, 0]),
        round=torch.full((3,), 4),
        params={"w": torch.tensor([[1.0], [2.0], [3.0]])},
        buffers={},
        payload={},
        weight=torch.ones(3, dtype=torch.float64),
        client_state={"part": {"h": torch.tensor([5.0, 6.0, 7.0])}},
        loss=torch.zeros(3),
    )
    new = server_at(1.0)
    updates = {0: ServerResult(new, new.model, torch.tensor([0.5, 0.5]))}
    after = _store_updates(state, updates, replies)
    assert [float(server.model.params["w"]) for server in after.global_models] == [1.0, 10.0]
    kept = {client: float(tree["part"]["h"]) for client, tree in after.client_states.items()}
    assert kept == {0: 7.0, 1: 0.0, 2: 5.0}
