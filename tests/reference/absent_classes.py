"""Masked cross-entropy (HeteroFL), FedLC and FedRS reimplemented example by example and class by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from reference.federated import Setting
from reference.plain_rounds import descend, play
from torch import Tensor, nn

# logits of an example [C], its label, the client's label counts -> scalar
Loss = Callable[[Tensor, int, Sequence[int]], Tensor]


def masked_cross_entropy(row: Tensor, label: int, counts: Sequence[int]) -> Tensor:
    """Diao et al. 2021: the outputs of classes the client lacks are 0."""
    total = row.new_zeros(())
    for c, count in enumerate(counts):
        total = total + (torch.exp(row[c]) if count > 0 else 1.0)
    return -torch.log(torch.exp(row[label]) / total)


def calibrated(tau: float) -> Loss:
    """Zhang et al. 2022: z_c - tau * n_c^(-1/4); the margin of a class without examples is
    infinite, and exp(-infinity) is 0.
    """

    def loss(row: Tensor, label: int, counts: Sequence[int]) -> Tensor:
        total = row.new_zeros(())
        for c, count in enumerate(counts):
            if count > 0:
                total = total + torch.exp(row[c] - tau * count ** (-1 / 4))
        return -torch.log(torch.exp(row[label] - tau * counts[label] ** (-1 / 4)) / total)

    return loss


def restricted(alpha: float) -> Loss:
    """Li and Zhan 2021: the scores of classes the client lacks are scaled by alpha."""

    def loss(row: Tensor, label: int, counts: Sequence[int]) -> Tensor:
        total = row.new_zeros(())
        for c, count in enumerate(counts):
            total = total + torch.exp(row[c] if count > 0 else alpha * row[c])
        return -torch.log(torch.exp(row[label]) / total)

    return loss


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    setting: Setting,
    loss: Loss,
) -> dict[str, Tensor]:
    def train_client(
        local: nn.Module,
        mine: Tensor,
        labels: Tensor,
        batches: Sequence[np.ndarray],
        client: int,
        lr: float,
    ) -> None:
        counts = [int((labels == c).sum()) for c in range(classes)]

        def loss_of(batch: np.ndarray) -> Tensor:
            logits = local(mine[batch])
            return torch.stack(
                [
                    loss(row, label, counts)
                    for row, label in zip(logits, labels[batch].tolist(), strict=True)
                ]
            ).mean()

        descend(local, batches, setting, lr, loss_of)

    return play(net, x, y, rows, setting, train_client)
