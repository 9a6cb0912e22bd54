"""FedBN (Li et al. 2021, algorithm 1) reimplemented in plain PyTorch and explicit loops; only
the random draws come from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from reference.federated import Setting, average, learning_rate, train_client
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


def names_of_normalization(net: nn.Module) -> list[str]:
    """The entries of a state dict that belong to a batch, group or layer norm."""
    names = []
    for path, module in net.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            names += [f"{path}.{name}" for name in module.state_dict()]
    return names


def train(
    net: nn.Module, x: Tensor, y: Tensor, classes: int, rows: Sequence[np.ndarray], setting: Setting
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the global state dict and the normalization of every client. rows: the training
    examples of each client
    """
    state, local_names = copy.deepcopy(net.state_dict()), names_of_normalization(net)
    own = [{name: state[name].clone() for name in local_names} for _ in rows]
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
            batches = [
                positions[:width]
                for positions, width in zip(plan.indices, plan.batch_sizes, strict=True)
            ]
            local = copy.deepcopy(net)
            local.load_state_dict({**state, **own[client]})
            train_client(
                local, x[mine], y[mine], classes, batches, setting, learning_rate(setting, round)
            )
            end = {name: value.detach().clone() for name, value in local.state_dict().items()}
            own[client] = {name: end[name] for name in local_names}
            trained.append({name: value for name, value in end.items() if name not in local_names})
        state = {**state, **average(trained, [len(rows[client]) for client in cohort])}
    return state, own
