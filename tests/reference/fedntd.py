"""FedNTD reimplemented from Lee et al. 2022, equations 4 and 5, example by example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, cross_entropy
from reference.plain_rounds import descend, frozen_copy, play
from torch import Tensor, nn


def not_true_distillation(student: Tensor, teacher: Tensor, labels: Tensor, tau: float) -> Tensor:
    """KL of the global model's softmax over the false classes from the local one's, a mean over
    examples. student, teacher: [B, C]
    """
    total = student.new_zeros(())
    for mine, theirs, label in zip(student, teacher, labels.tolist(), strict=True):
        false = [c for c in range(len(mine)) if c != label]
        local, received = torch.exp(mine / tau), torch.exp(theirs / tau)
        for c in false:
            p, q = received[c] / received[false].sum(), local[c] / local[false].sum()
            total = total + p * torch.log(p / q)
    return total / len(labels)


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    beta: float,
    tau: float,
) -> dict[str, Tensor]:
    def train_client(
        local: nn.Module,
        mine: Tensor,
        labels: Tensor,
        batches: Sequence[np.ndarray],
        client: int,
        lr: float,
    ) -> None:
        received = frozen_copy(local)

        def loss_of(batch: np.ndarray) -> Tensor:
            logits = local(mine[batch])
            kept = not_true_distillation(logits, received(mine[batch]), labels[batch], tau)
            return cross_entropy(logits, labels[batch]) + beta * tau**2 * kept

        descend(local, batches, setting, lr, loss_of)

    return play(net, x, y, rows, setting, train_client)
