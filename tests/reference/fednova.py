"""FedNova (Wang et al. 2020) reimplemented in plain PyTorch and explicit loops; only the random
draws come from the package.

The effective steps come from the paper's vectors a_i written out, not from an optimizer: entry s of
a_i is the weight of gradient s in the update.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, average, learning_rate, train_client
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


def effective_steps(
    steps: int, lr: float, momentum: float = 0.0, mu: float = 0.0, weight_decay: float = 0.0
) -> float:
    """||a_i||_1 from y_{s+1} = y_s - lr * v_s, v_s = momentum * v_{s-1} + g_s + pull * (y_s -
    x): follow each single gradient to the end.
    """
    pull = mu + weight_decay
    total = 0.0
    for source in range(steps):
        way, velocity = 0.0, 0.0  # the effect of gradient `source` alone so far, in units of -lr
        for step in range(source, steps):
            gradient = 1.0 if step == source else 0.0
            velocity = momentum * velocity + gradient - lr * pull * way
            way = way + velocity
        total += way
    return total


def train(
    net: nn.Module, x: Tensor, y: Tensor, classes: int, rows: Sequence[np.ndarray], setting: Setting
) -> dict[str, Tensor]:
    """Run all rounds and return the global state dict. rows: the training examples of each client"""
    state = copy.deepcopy(net.state_dict())
    names = [name for name, _ in net.named_parameters()]
    for round in range(1, setting.rounds + 1):
        key, lr = Key(setting.seed).fold_in("round", round), learning_rate(setting, round)
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        sizes, trained, a = [len(rows[client]) for client in cohort], [], []
        for client in cohort:
            mine = rows[client]
            plan = plan_batches(
                key.fold_in("client", client, "plan", 0),
                len(mine),
                setting.batch,
                epochs=setting.epochs,
            )
            local = copy.deepcopy(net)
            local.load_state_dict(state)
            batches = [
                positions[:width]
                for positions, width in zip(plan.indices, plan.batch_sizes, strict=True)
            ]
            train_client(local, x[mine], y[mine], classes, batches, setting, lr)
            trained.append(
                {name: value.detach().clone() for name, value in local.state_dict().items()}
            )
            a.append(
                effective_steps(
                    len(batches), lr, setting.momentum, setting.mu, setting.weight_decay
                )
            )
        p = [size / sum(sizes) for size in sizes]
        tau = sum(share * steps for share, steps in zip(p, a, strict=True))
        merged = average(trained, sizes)  # batch norm's statistics; the parameters follow
        for name in names:
            direction = torch.zeros_like(state[name])
            for share, steps, end in zip(p, a, trained, strict=True):
                direction = direction + share * (end[name] - state[name]) / steps
            merged[name] = state[name] + tau * direction
        state = merged
    return state
