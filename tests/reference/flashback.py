"""Flashback reimplemented line by line from its algorithm 1, in plain PyTorch and explicit loops."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, average, cross_entropy, learning_rate, make_optimizer
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

State = dict[str, Tensor]


def dynamic_alpha(nu: list[float], mus: list[list[float]]) -> list[list[float]]:
    """Section 4.1: alpha_i = mu_i / (nu + sum_k mu_k); a class without examples has no teacher."""
    alphas = []
    for mu in mus:
        row = []
        for c in range(len(nu)):
            seen = nu[c] + sum(other[c] for other in mus)
            row.append(mu[c] / seen if seen > 0 else 0.0)
        alphas.append(row)
    return alphas


def dynamic_loss(
    logits: Tensor, labels: Tensor, said: list[Tensor], alphas: list[list[float]]
) -> Tensor:
    """Equation 3, as a mean over the examples. logits: [B, C]; said: those of each teacher [B, C]"""
    loss = cross_entropy(logits, labels)
    for teacher, alpha in zip(said, alphas, strict=True):
        for row, target in zip(logits, teacher, strict=True):
            q, p = (
                torch.exp(row) / torch.exp(row).sum(),
                torch.exp(target) / torch.exp(target).sum(),
            )
            for c, weight in enumerate(alpha):
                loss = loss + weight * p[c] * torch.log(p[c] / q[c]) / len(labels)
    return loss


def load(net: nn.Module, state: State, training: bool) -> nn.Module:
    copied = copy.deepcopy(net)
    copied.load_state_dict(state)
    return copied.train(training)


def descend(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: list[np.ndarray],
    teachers: list[nn.Module],
    alphas: list[list[float]],
    setting: Setting,
    lr: float,
) -> State:
    """Lines 8 to 12, and again 19 to 23."""
    optimizer = make_optimizer(net, setting, lr)
    for batch in batches:
        with torch.no_grad():
            said = [teacher(x[batch]) for teacher in teachers]
        loss = dynamic_loss(net(x[batch]), y[batch], said, alphas)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def split(key: Key, count: int, batch: int, epochs: int) -> list[np.ndarray]:
    plan = plan_batches(key, count, batch, epochs=epochs)
    return [
        positions[:width] for positions, width in zip(plan.indices, plan.batch_sizes, strict=True)
    ]


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    public: np.ndarray,
    setting: Setting,
    gamma: float,
    server_epochs: int,
) -> tuple[State, list[float], list[int]]:
    """Return the global state dict, pi and r."""
    state = copy.deepcopy(net.state_dict())
    pi, r = [0.0] * classes, [0] * len(rows)  # line 1
    counts = [[float((y[mine] == c).sum()) for c in range(classes)] for mine in rows]
    for t in range(1, setting.rounds + 1):
        key = Key(setting.seed).fold_in("round", t)
        # line 3
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        lr = learning_rate(setting, t)
        previous = load(net, state, training=False)
        trained = []
        for k in cohort:
            batches = split(
                key.fold_in("client", k, "plan", 0), len(rows[k]), setting.batch, setting.epochs
            )
            teachers = [previous] if t > 1 else []  # line 10: plain cross-entropy when t = 1
            alphas = dynamic_alpha(counts[k], [pi]) if t > 1 else []
            local = load(net, state, training=True)
            trained.append(
                descend(local, x[rows[k]], y[rows[k]], batches, teachers, alphas, setting, lr)
            )
        state = average(trained, [len(rows[k]) for k in cohort])  # lines 14 and 15
        teachers = [load(net, w, training=False) for w in trained]  # line 17
        mus = [counts[k] for k in cohort]
        if t > 1:
            teachers, mus = [*teachers, previous], [*mus, pi]
        batches = split(
            key.fold_in("server", "fit").fold_in("call", 0).fold_in("plan"),
            len(public),
            setting.batch,
            server_epochs,
        )
        merged = load(net, state, training=True)
        state = descend(
            merged, x[public], y[public], batches, teachers, dynamic_alpha(pi, mus), setting, lr
        )
        for k in cohort:  # lines 24 to 29
            r[k] += 1
        for k in cohort:
            if gamma * r[k] <= 1:
                pi = [pi[c] + gamma * counts[k][c] for c in range(classes)]
    return state, pi, r
