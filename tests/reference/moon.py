"""MOON reimplemented from Li, He, Song 2021, algorithm 1, example by example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, cross_entropy
from reference.plain_rounds import descend, features_of, frozen_copy, play
from torch import Tensor, nn


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (torch.sqrt((a * a).sum()) * torch.sqrt((b * b).sum()))


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """Equation 3, a mean over examples. z, z_glob, z_prev: [B, d]"""
    total = z.new_zeros(())
    for mine, theirs, before in zip(z, z_glob, z_prev, strict=True):
        near, far = (
            torch.exp(cosine(mine, theirs) / temperature),
            torch.exp(cosine(mine, before) / temperature),
        )
        total = total - torch.log(near / (near + far))
    return total / len(z)


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    mu: float,
    temperature: float,
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return the global state dict, and the last local one of each client that took part."""
    last: dict[int, nn.Module] = {}

    def train_client(
        local: nn.Module,
        mine: Tensor,
        labels: Tensor,
        batches: Sequence[np.ndarray],
        client: int,
        lr: float,
    ) -> None:
        received, previous = frozen_copy(local), last.get(client)

        def loss_of(batch: np.ndarray) -> Tensor:
            logits, z = features_of(local, mine[batch])
            loss = cross_entropy(logits, labels[batch])
            if previous is None:
                return loss
            _, z_glob = features_of(received, mine[batch])
            _, z_prev = features_of(previous, mine[batch])
            return loss + mu * contrast(z, z_glob, z_prev, temperature)

        descend(local, batches, setting, lr, loss_of)
        last[client] = frozen_copy(local)

    state = play(net, x, y, rows, setting, train_client)
    return state, {client: dict(model.state_dict()) for client, model in last.items()}
