"""SCAFFOLD (Karimireddy et al. 2020, algorithm 1) reimplemented in plain PyTorch and
explicit loops; only the random draws come from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, average, cross_entropy, learning_rate
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    option: int,
    equal: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the global state dict, c, and the c_i of all clients. rows: the training examples of
    each client
    """
    names, number = [name for name, _ in net.named_parameters()], len(rows)
    state = copy.deepcopy(net.state_dict())
    c = {name: torch.zeros_like(state[name]) for name in names}
    c_i = [{name: torch.zeros_like(state[name]) for name in names} for _ in rows]
    for round in range(1, setting.rounds + 1):
        key, lr = Key(setting.seed).fold_in("round", round), learning_rate(setting, round)
        cohort = sorted(key.fold_in("cohort").permutation(number)[: setting.cohort].tolist())
        trained, changes = [], []
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
            optimizer = torch.optim.SGD(
                local.parameters(),
                lr=lr,
                momentum=setting.momentum,
                weight_decay=setting.weight_decay,
            )
            for positions, width in zip(plan.indices, plan.batch_sizes, strict=True):
                batch = mine[positions[:width]]
                optimizer.zero_grad()
                cross_entropy(local(x[batch]), y[batch]).backward()
                for name, parameter in local.named_parameters():
                    assert parameter.grad is not None
                    parameter.grad += c[name] - c_i[client][name]  # line 10
                optimizer.step()
            end = {name: value.detach().clone() for name, value in local.state_dict().items()}
            plus = {}
            if option == 1:  # line 12, (i)
                whole = copy.deepcopy(net)
                whole.load_state_dict(state)
                cross_entropy(whole(x[mine]), y[mine]).backward()
                for name, parameter in whole.named_parameters():
                    assert parameter.grad is not None
                    plus[name] = parameter.grad.clone()
            else:  # line 12, (ii)
                for name in names:
                    plus[name] = (
                        c_i[client][name]
                        - c[name]
                        + (state[name] - end[name]) / (len(plan.batch_sizes) * lr)
                    )
            trained.append(end)
            changes.append({name: plus[name] - c_i[client][name] for name in names})
            c_i[client] = plus
        # lines 16 and 17, with a server rate of 1
        state = average(trained, [1 if equal else len(rows[client]) for client in cohort])
        for change in changes:
            for name in names:
                c[name] = c[name] + change[name] / number
    return state, c, c_i
