"""Clustered federated learning: several global models, each used by some of the clients. Clients
are reassigned to models at the beginning of every time step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import Engine
from remanence.core.types import ModelState
from remanence.training.server_step import Server, average_buffers
from remanence.training.state import RunState
from remanence.training.task import TrainingTask


def reassign_clients(
    task: TrainingTask, engine: Engine, state: RunState, time_step: int
) -> RunState:
    """Evaluate every global model on every client's new training examples; the method decides
    which one each client uses, and how the models are merged or copied.
    """
    part = task.method.part_filling("model_assignment")
    assert part is not None
    assert part.model_assignment is not None
    models = state.models
    clients, count = task.info.num_clients, len(state.global_models)
    which, owners = np.tile(np.arange(count), clients), np.repeat(np.arange(clients), count)
    scores = engine.score_pairs(models, which, owners, "train", time_step)
    costs = scores.mean_loss().numpy()
    if part.model_assignment.measure == "accuracy":
        confusion = scores.confusion.numpy()
        costs = 1 - np.trace(confusion, axis1=1, axis2=2) / confusion.sum(axis=(1, 2))
    costs = np.where(np.isfinite(costs), costs, np.inf).reshape(clients, count)
    sizes = task.population.at(time_step).train.sizes
    hyper = task.hparam_tensors().get(part.name, {})
    decision = part.model_assignment.decide(
        costs,
        state.models_used_by(np.arange(clients)),
        sizes,
        state.assignment_state[part.name],
        hyper,
    )
    servers = [merge_models(state.global_models, shares) for shares in decision.mixing_matrix]
    return replace(
        state,
        server=servers[0],
        extra_servers=tuple(servers[1:]),
        model_of_client=torch.from_numpy(decision.model_of_client.astype(np.int64)),
        assignment_state={part.name: decision.state},
    )


def merge_models(servers: tuple[Server, ...], shares: np.ndarray) -> Server:
    """The weighted mean of global models. shares: [models], summing to 1"""
    used = np.flatnonzero(shares)
    if len(used) == 1:
        return servers[int(used[0])]
    weights = torch.from_numpy(shares[used])
    params, buffers = ModelState.stack([servers[int(number)].model for number in used])
    return Server(
        ModelState(pytree.weighted_sum(weights, params), average_buffers({}, buffers, weights)), {}
    )
