"""FedDF reimplemented from its algorithm 1 and its authors' settings, in plain PyTorch and
explicit loops.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from reference.federated import Setting, average, learning_rate, train_client
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

State = dict[str, Tensor]


@dataclass(frozen=True)
class Distillation:
    steps: int
    patience: int
    lr: float
    batch: int
    validation: float
    clip: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """The result of the distillation of a round."""

    taken: int  # steps
    kept: int  # the step whose model was kept
    clipped: int  # steps whose gradient was longer than the limit


def ensemble_loss(logits: Tensor, said: Sequence[Tensor]) -> Tensor:
    """KL(softmax of the teachers' mean logits || softmax of the student's), as a mean over the
    examples.
    """
    total = logits.new_zeros(())
    for place, row in enumerate(logits):
        mean = torch.zeros_like(row)
        for teacher in said:
            mean = mean + teacher[place] / len(said)
        p, q = torch.exp(mean) / torch.exp(mean).sum(), torch.exp(row) / torch.exp(row).sum()
        for c in range(len(row)):
            total = total + p[c] * (torch.log(p[c]) - torch.log(q[c]))
    return total / len(logits)


def count_right(net: nn.Module, x: Tensor, y: Tensor) -> int:
    net.eval()
    with torch.no_grad():
        right = sum(
            int(net(row.unsqueeze(0)).argmax()) == int(label)
            for row, label in zip(x, y, strict=True)
        )
    net.train()
    return right


def snapshot(net: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def distill(
    student: nn.Module,
    teachers: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    chosen: Distillation,
    key: Key,
) -> tuple[State, Outcome]:
    """x, y: the public set"""
    order = key.fold_in("validation").permutation(len(x))
    held = round(chosen.validation * len(x))
    watched, places = sorted(order[:held].tolist()), np.array(sorted(order[held:].tolist()))
    plan = plan_batches(key.fold_in("plan"), len(places), chosen.batch, steps=chosen.steps)
    optimizer = torch.optim.Adam(student.parameters(), lr=chosen.lr)
    student.train()
    best, best_right, best_step, step, clipped = snapshot(student), -1, 0, 0, 0
    for step in range(chosen.steps):
        rows = places[plan.indices[step, : plan.batch_sizes[step]]]
        with torch.no_grad():
            said = [teacher(x[rows]) for teacher in teachers]
        optimizer.param_groups[0]["lr"] = (
            chosen.lr * (1 + math.cos(math.pi * step / chosen.steps)) / 2
        )
        optimizer.zero_grad()
        ensemble_loss(student(x[rows]), said).backward()
        if chosen.clip:
            norm = torch.nn.utils.clip_grad_norm_(student.parameters(), chosen.clip)
            clipped += int(norm > chosen.clip)
        optimizer.step()
        if held:
            right = count_right(student, x[watched], y[watched])
            if right > best_right:
                best, best_right, best_step = snapshot(student), right, step
            elif step - best_step >= chosen.patience:
                break
    return (
        (best, Outcome(step + 1, best_step, clipped))
        if held
        else (snapshot(student), Outcome(step + 1, step, clipped))
    )


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    public: np.ndarray,
    setting: Setting,
    chosen: Distillation,
) -> tuple[State, list[Outcome]]:
    """Return the global state dict and the distillation of each round; validates after every step."""
    state, outcomes = copy.deepcopy(net.state_dict()), []
    for round in range(1, setting.rounds + 1):
        key = Key(setting.seed).fold_in("round", round)
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        clients = []
        for k in cohort:
            plan = plan_batches(
                key.fold_in("client", k, "plan", 0),
                len(rows[k]),
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
                x[rows[k]],
                y[rows[k]],
                classes,
                batches,
                setting,
                learning_rate(setting, round),
            )
            clients.append(local.eval())
        student = copy.deepcopy(net)
        student.load_state_dict(
            average([snapshot(local) for local in clients], [len(rows[k]) for k in cohort])
        )
        state, outcome = distill(
            student,
            clients,
            x[public],
            y[public],
            chosen,
            key.fold_in("server", "fit").fold_in("call", 0),
        )
        outcomes.append(outcome)
    return state, outcomes
