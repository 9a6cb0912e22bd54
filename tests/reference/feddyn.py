"""FedDyn (Acar et al. 2021, algorithm 1) reimplemented in plain PyTorch and explicit loops; only
the random draws come from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, average, cross_entropy, learning_rate
from reference.plain_rounds import descend
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

State = dict[str, Tensor]


def solve(
    net: nn.Module,
    w_t: State,
    h_k: State,
    alpha: float,
    x: Tensor,
    y: Tensor,
    batches: Sequence[np.ndarray],
    setting: Setting,
    lr: float,
) -> State:
    """w_k, by descent from w_t on f_k(w) - <h_k, w> + alpha/2 ||w - w_t||^2. x, y: the client's"""
    local = copy.deepcopy(net)
    local.load_state_dict(w_t)

    def loss_of(batch: np.ndarray) -> Tensor:
        loss = cross_entropy(local(x[batch]), y[batch])
        for name, w in local.named_parameters():
            loss = loss - (h_k[name] * w).sum() + alpha / 2 * ((w - w_t[name]) ** 2).sum()
        return loss

    descend(local, batches, setting, lr, loss_of)
    return {name: value.detach().clone() for name, value in local.state_dict().items()}


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    alpha: float,
) -> tuple[State, State, list[State]]:
    """Return the global state dict, h, and the h_k of all clients. rows: the training examples of
    each client
    """
    names, m = [name for name, _ in net.named_parameters()], len(rows)
    state = copy.deepcopy(net.state_dict())
    h = {name: torch.zeros_like(state[name]) for name in names}
    h_k = [{name: torch.zeros_like(state[name]) for name in names} for _ in rows]
    for round in range(1, setting.rounds + 1):
        key, lr = Key(setting.seed).fold_in("round", round), learning_rate(setting, round)
        participants = sorted(key.fold_in("cohort").permutation(m)[: setting.cohort].tolist())
        w_k = []
        for client in participants:
            mine = rows[client]
            plan = plan_batches(
                key.fold_in("client", client, "plan", 0),
                len(mine),
                setting.batch,
                epochs=setting.epochs,
            )
            batches = [
                positions[:width]
                for positions, width in zip(plan.indices, plan.batch_sizes, strict=True)
            ]
            w = solve(net, state, h_k[client], alpha, x[mine], y[mine], batches, setting, lr)
            for name in names:
                h_k[client][name] = h_k[client][name] - alpha * (w[name] - state[name])
            w_k.append(w)
        new = average(w_k, [1] * len(w_k))  # also of batch norm's statistics
        for name in names:
            for w in w_k:
                h[name] = h[name] - alpha / m * (w[name] - state[name])
            new[name] = new[name] - h[name] / alpha
        state = new
    return state, h, h_k
