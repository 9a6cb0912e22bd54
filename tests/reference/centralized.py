"""Centralized training with forgetting events (Hong et al. 2022, section 3.1), in plain PyTorch
and explicit loops; only the random draws come from the package.
"""

from __future__ import annotations

import numpy as np
import torch
from reference.federated import Setting, cross_entropy, learning_rate, make_optimizer
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


def right_and_margin_error(net: nn.Module, row: Tensor, label: int) -> tuple[bool, float]:
    """The margin error is the largest wrong logit less the true one."""
    with torch.no_grad():
        logits = net(row.unsqueeze(0))[0].tolist()
    wrong = [value for place, value in enumerate(logits) if place != label]
    return logits.index(max(logits)) == label, max(wrong) - logits[label]


def train(
    net: nn.Module, x: Tensor, y: Tensor, rows: np.ndarray, setting: Setting
) -> list[dict[str, dict[int, int]]]:
    """Train in place and return, for every round, the events of each kind by example."""
    history = []
    for round in range(1, setting.rounds + 1):
        events: dict[str, dict[int, int]] = {"right_to_wrong": {}, "margin_rise": {}}
        key = Key(setting.seed).fold_in("round", round, "client", 0, "plan", 0)
        plan = plan_batches(key, len(rows), setting.batch, epochs=setting.epochs)
        optimizer = make_optimizer(net, setting, learning_rate(setting, round))
        batch_a: list[int] = []
        before: list[tuple[bool, float]] = []
        for positions, width in zip(plan.indices, plan.batch_sizes, strict=True):
            batch_b = rows[positions[:width]].tolist()
            optimizer.zero_grad()
            cross_entropy(net(x[batch_b]), y[batch_b]).backward()
            optimizer.step()
            for example, (was_right, old_error) in zip(batch_a, before, strict=True):
                is_right, new_error = right_and_margin_error(net, x[example], int(y[example]))
                if was_right and not is_right:
                    events["right_to_wrong"][example] = events["right_to_wrong"].get(example, 0) + 1
                if new_error > old_error:
                    events["margin_rise"][example] = events["margin_rise"].get(example, 0) + 1
            batch_a, before = (
                batch_b,
                [right_and_margin_error(net, x[example], int(y[example])) for example in batch_b],
            )
        history.append(events)
    return history
