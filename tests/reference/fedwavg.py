"""FedWAvg reimplemented line by line from its algorithm 1, in plain PyTorch and explicit loops."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, learning_rate, train_client
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

State = dict[str, Tensor]


def predict(net: nn.Module, state: State, x: Tensor) -> list[int]:
    copied = copy.deepcopy(net)
    copied.load_state_dict(state)
    copied.eval()
    with torch.no_grad():
        return [int(copied(row.unsqueeze(0)).argmax()) for row in x]


def averaging_weights(counts: Sequence[float], alpha: float) -> list[float]:
    """Equation 2; all ones if no client forgot an example."""
    if sum(counts) == 0:
        return [1.0] * len(counts)
    return [(1 - alpha) + alpha * (count / sum(counts) * len(counts)) for count in counts]


def weighted_average(states: Sequence[State], weights: Sequence[float]) -> State:
    """Line 15: 1/N sum_n theta_n * W[n]; for a counter of batches, the largest."""
    result = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            result[name] = torch.zeros_like(first)
            for state, weight in zip(states, weights, strict=True):
                result[name] += state[name] * weight / len(states)
        else:
            result[name] = torch.stack([state[name] for state in states]).max()
    return result


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    setting: Setting,
    alpha: float,
    every: int,
    kept: Sequence[str] = (),
) -> tuple[State, list[dict[int, float]]]:
    """Return the global state dict and the F that every client of each round uploaded. kept: the
    entries that clients do not send; theirs are part of every model that a client evaluates.
    """
    theta_g = copy.deepcopy(net.state_dict())
    forgotten = [1.0] * len(rows)  # line 2
    theta: dict[int, State] = {}  # each client's last local model
    uploads = []
    for round in range(1, setting.rounds + 1):
        key = Key(setting.seed).fold_in("round", round)
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        trained = []
        for n in cohort:
            mine_x, mine_y = x[rows[n]], y[rows[n]]
            received = theta_g | {name: theta[n][name] for name in kept if n in theta}
            if n in theta and round % every == 0:  # lines 5 and 10 to 12
                right_before = [
                    predicted == int(label)
                    for predicted, label in zip(predict(net, theta[n], mine_x), mine_y, strict=True)
                ]
                right_now = [
                    predicted == int(label)
                    for predicted, label in zip(predict(net, received, mine_x), mine_y, strict=True)
                ]
                forgotten[n] = float(
                    sum(
                        before and not now
                        for before, now in zip(right_before, right_now, strict=True)
                    )
                )
            plan = plan_batches(
                key.fold_in("client", n, "plan", 0),
                len(rows[n]),
                setting.batch,
                epochs=setting.epochs,
            )
            batches = [
                positions[:width]
                for positions, width in zip(plan.indices, plan.batch_sizes, strict=True)
            ]
            local = copy.deepcopy(net)
            local.load_state_dict(received)
            train_client(
                local, mine_x, mine_y, classes, batches, setting, learning_rate(setting, round)
            )
            theta[n] = {name: value.detach().clone() for name, value in local.state_dict().items()}
            trained.append({name: x for name, x in theta[n].items() if name not in kept})
        uploads.append({n: forgotten[n] for n in cohort})
        theta_g = theta_g | weighted_average(
            trained, averaging_weights([forgotten[n] for n in cohort], alpha)
        )
    return theta_g, uploads
