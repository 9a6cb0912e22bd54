"""Server optimizers (Hsu et al. 2019; Reddi et al. 2021, algorithm 2) reimplemented in
plain PyTorch and explicit loops; only the random draws come from the package.
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


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    setting: Setting,
    kind: str,
    **numbers: float,
) -> dict[str, Tensor]:
    """Run all rounds and return the global state dict. rows: the training examples of each client"""
    state = copy.deepcopy(net.state_dict())
    names = [name for name, _ in net.named_parameters()]
    m = {name: torch.zeros_like(state[name]) for name in names}
    # v_{-1}, at least tau^2
    v = {name: torch.zeros_like(state[name]) + numbers.get("tau", 0.0) ** 2 for name in names}
    for round in range(1, setting.rounds + 1):
        key = Key(setting.seed).fold_in("round", round)
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        trained = []
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
            train_client(
                local, x[mine], y[mine], classes, batches, setting, learning_rate(setting, round)
            )
            trained.append(
                {name: value.detach().clone() for name, value in local.state_dict().items()}
            )
        merged = average(trained, [len(rows[client]) for client in cohort])
        for name in names:
            delta = merged[name] - state[name]
            if kind == "fedavgm":
                m[name] = numbers["momentum"] * m[name] + delta
                merged[name] = state[name] + numbers["lr"] * m[name]
                continue
            m[name] = numbers["beta1"] * m[name] + (1 - numbers["beta1"]) * delta
            if kind == "fedadam":
                v[name] = numbers["beta2"] * v[name] + (1 - numbers["beta2"]) * delta**2
            elif kind == "fedyogi":
                bigger, smaller = v[name] > delta**2, v[name] < delta**2
                v[name] = v[name] + (1 - numbers["beta2"]) * delta**2 * (
                    smaller.double() - bigger.double()
                )
            else:
                v[name] = v[name] + delta**2
            merged[name] = state[name] + numbers["lr"] * m[name] / (v[name].sqrt() + numbers["tau"])
        state = merged
    return state
