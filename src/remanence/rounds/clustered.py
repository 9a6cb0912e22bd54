"""Several global models: who uses which, decided anew at the beginning of every time step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.types import Engine, ModelState
from remanence.training.client_step import TrainingTask
from remanence.training.server_step import Server, average_buffers
from remanence.training.state import RunState


def reassign_clients(
    task: TrainingTask, engine: Engine, state: RunState, time_step: int
) -> RunState:
    """Every client tries every global model on its new training rows; the method decides who
    uses which, and what becomes of the models.
    """
    owner = task.method.owner("assign")
    assert owner is not None
    assert owner.assign is not None
    models = state.models
    clients, count = task.world.clients, len(state.servers)
    which, owners = np.tile(np.arange(count), clients), np.repeat(np.arange(clients), count)
    scores = engine.score_pairs(models, which, owners, "train", time_step)
    values = scores.mean_loss().numpy()
    if owner.assign.measure == "accuracy":
        confusion = scores.confusion.numpy()
        values = 1 - np.trace(confusion, axis1=1, axis2=2) / confusion.sum(axis=(1, 2))
    values = np.where(np.isfinite(values), values, np.inf).reshape(clients, count)
    rows = task.population.at(time_step).train.sizes
    hyper = task.number_tensors().get(owner.name, {})
    decision = owner.assign.decide(
        values, state.used_by(np.arange(clients)), rows, state.assign[owner.name], hyper
    )
    servers = [merge_models(state.servers, shares) for shares in decision.recipe]
    return replace(
        state,
        server=servers[0],
        others=tuple(servers[1:]),
        uses=torch.from_numpy(decision.model.astype(np.int64)),
        assign={owner.name: decision.state},
    )


def merge_models(servers: tuple[Server, ...], shares: np.ndarray) -> Server:
    """A global model made of others. shares: [models], summing to 1"""
    used = np.flatnonzero(shares)
    if len(used) == 1:
        return servers[int(used[0])]
    weights = torch.from_numpy(shares[used])
    params, buffers = ModelState.stack([servers[int(number)].model for number in used])
    return Server(
        ModelState(pytree.weighted_sum(weights, params), average_buffers({}, buffers, weights)), {}
    )
