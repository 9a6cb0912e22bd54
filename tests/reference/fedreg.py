"""FedReg reimplemented in plain PyTorch: every gradient by a backward pass through a copy of the
model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference.federated import Setting, cross_entropy, make_optimizer
from reference.plain_rounds import frozen_copy, play
from torch import Tensor, nn


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """logits, teacher: [B, C]"""
    total = logits.new_zeros(())
    for row, p in zip(logits, teacher, strict=True):
        total = total - (p * (row - torch.log(torch.exp(row).sum()))).sum()
    return total / len(logits)


def ascend(old: nn.Module, x: Tensor, labels: Tensor, size: float, steps: int) -> Tensor:
    """Inputs moved up the loss of the received model, one gradient sign at a time."""
    moved = x.clone()
    for _ in range(steps):
        leaf = moved.clone().requires_grad_()
        # a copy, because batch norm updates its statistics
        cross_entropy(copy.deepcopy(old).train()(leaf), labels).backward()
        assert leaf.grad is not None
        moved = moved + size * leaf.grad.sign()
    return moved


def blend(local: nn.Module, old: nn.Module, share: float) -> nn.Module:
    """A model at share * w + (1 - share) * w_old."""
    result = copy.deepcopy(local)
    with torch.no_grad():
        for p, new, before in zip(
            result.parameters(), local.parameters(), old.parameters(), strict=True
        ):
            p.copy_(share * new + (1 - share) * before)
    return result.train()


def flat_gradient(loss: Tensor, net: nn.Module) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))])


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    gamma: float,
    beta: float,
    eta_s: float,
    eta_p: float,
    against: dict[str, int],
    floor: float = 1e-8,
) -> dict[str, Tensor]:
    """against: counts how often a projection was subtracted"""

    def train_client(
        local: nn.Module,
        mine: Tensor,
        labels: Tensor,
        batches: Sequence[np.ndarray],
        client: int,
        lr: float,
    ) -> None:
        old = frozen_copy(local)
        optimizer = make_optimizer(local, setting, lr)
        for batch in batches:
            here, label = mine[batch], labels[batch]
            pseudo, perturbed = (
                ascend(old, here, label, eta_s, 10),
                ascend(old, here, label, eta_p, 1),
            )
            teacher = torch.softmax(old(pseudo), dim=1)
            at_gamma, at_beta = blend(local, old, gamma), blend(local, old, beta)
            g = flat_gradient(cross_entropy(at_gamma(here), label), at_gamma)
            s = flat_gradient(soft_cross_entropy(at_beta(pseudo), teacher), at_beta)
            p = flat_gradient(cross_entropy(at_beta(perturbed), label), at_beta)
            result = g.clone()
            for name, memory in (("pseudo", s), ("perturbed", p)):
                inner = float((g * memory).sum())
                if inner < 0:
                    against[name] += 1
                    result = result - inner / max(float((memory * memory).sum()), floor) * memory
            place = 0
            for parameter in local.parameters():
                parameter.grad = result[place : place + parameter.numel()].reshape(parameter.shape)
                place += parameter.numel()
            local.train()
            with torch.no_grad():
                local(here)  # batch norm's statistics are those of the batch itself
            optimizer.step()

    return play(net, x, y, rows, setting, train_client, by_size=False)
