"""FedAvg, FedProx, WSM and TCE reimplemented in plain PyTorch and explicit loops.

The training code of the package is not used here. Modules, autograd and optimizers are torch's;
losses, averages, sampling and schedules are written out from the papers. Only the random draws are
shared, so that results can be compared: keys select the clients, and `plan_batches` the examples of
each step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


@dataclass(frozen=True)
class Setting:
    """An experiment with the names of the papers."""

    rounds: int
    cohort: int  # clients a round
    epochs: int
    batch: int
    loss: str = "ce"  # ce | wsm | tce
    mu: float = 0.0  # FedProx
    optimizer: str = "sgd"  # sgd | adam
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"  # constant | cosine | exponential
    decay: float = 1.0
    seed: int = 0


def normalize(x: np.ndarray) -> Tensor:
    """To mean 0 and standard deviation 1, by column of a table [n, f] or by channel of images
    [n, c, h, w].
    """
    values = x.astype(np.float64)
    for column in range(x.shape[1]):
        values[:, column] = (values[:, column] - x[:, column].astype(np.float64).mean()) / x[
            :, column
        ].astype(np.float64).std()
    return torch.from_numpy(values)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Legate 2022, equation 14, as a mean over the examples. logits: [B, C]"""
    total = logits.new_zeros(())
    for row, label in zip(logits, labels, strict=True):
        total = total - (row[label] - torch.log(torch.exp(row).sum()))
    return total / len(labels)


def re_weighted_softmax(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """WSM, Legate 2022, equation 15: alpha_c is the fraction of class c among the client's
    labels.
    """
    total = logits.new_zeros(())
    for row, label in zip(logits, labels, strict=True):
        contrast = logits.new_zeros(())
        for c, count in enumerate(counts):
            contrast = contrast + count / sum(counts) * torch.exp(row[c])
        total = total - (row[label] - torch.log(contrast))
    return total / len(labels)


def truncated_cross_entropy(logits: Tensor, labels: Tensor, counts: Sequence[int]) -> Tensor:
    """TCE, Legate et al. 2022, equation 3: the denominator runs over the classes the client has."""
    own = [c for c, count in enumerate(counts) if count > 0]
    total = logits.new_zeros(())
    for row, label in zip(logits, labels, strict=True):
        total = total - torch.log(torch.exp(row[label]) / torch.exp(row[own]).sum())
    return total / len(labels)


def learning_rate(setting: Setting, round: int) -> float:
    """Return the learning rate of a round; rounds count from 1."""
    if setting.schedule == "exponential":
        return setting.lr * setting.decay ** (round - 1)
    if setting.schedule == "cosine":
        return setting.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / (setting.rounds - 1)))
    return setting.lr


def make_optimizer(net: nn.Module, setting: Setting, lr: float) -> torch.optim.Optimizer:
    if setting.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=lr, weight_decay=setting.weight_decay)
    return torch.optim.SGD(
        net.parameters(), lr=lr, momentum=setting.momentum, weight_decay=setting.weight_decay
    )


def train_client(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    batches: Sequence[np.ndarray],
    setting: Setting,
    lr: float,
    counted: Tensor | None = None,
) -> None:
    """Local training in place. x: [n, ...], y: [n] are this client's; batches: positions in
    them; counted: the labels that WSM and TCE count, if not y
    """
    held = y if counted is None else counted
    counts = [int((held == c).sum()) for c in range(classes)]
    received = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = make_optimizer(net, setting, lr)
    net.train()
    for batch in batches:
        logits, labels = net(x[batch]), y[batch]
        if setting.loss == "wsm":
            loss = re_weighted_softmax(logits, labels, counts)
        elif setting.loss == "tce":
            loss = truncated_cross_entropy(logits, labels, counts)
        else:
            loss = cross_entropy(logits, labels)
        for parameter, anchor in zip(net.parameters(), received, strict=True):
            # Li et al. 2020, equation 2
            loss = loss + setting.mu / 2 * ((parameter - anchor) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def average(states: Sequence[dict[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """sum_k n_k / n * w_k for weights and statistics (McMahan et al. 2017); a counter of
    batches has no mean: the largest.
    """
    result = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            result[name] = torch.zeros_like(first)
            for state, size in zip(states, sizes, strict=True):
                result[name] += size / sum(sizes) * state[name]
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
    counted: Sequence[np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """Run all rounds and return the global state dict. rows: the training examples of each client;
    counted: those whose labels the loss counts, if not the same
    """
    state = copy.deepcopy(net.state_dict())
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
            local.load_state_dict(state)
            train_client(
                local,
                x[mine],
                y[mine],
                classes,
                batches,
                setting,
                learning_rate(setting, round),
                None if counted is None else y[counted[client]],
            )
            trained.append(
                {name: value.detach().clone() for name, value in local.state_dict().items()}
            )
        state = average(trained, [len(rows[client]) for client in cohort])
    return state
