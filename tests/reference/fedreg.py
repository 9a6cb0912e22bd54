"""FedReg reimplemented in plain PyTorch as its authors' program behaves (Xu et al. 2022).

What their program does where the paper leaves it open: pseudo and perturbed examples are made once
a round, from batches of one pass of their own; step i of the round uses batch i of them and starts
again after the last; after every step the whole displacement since the start of the round is
projected. Only the random draws come from the package: the clients of a round, the examples of each
step, and the order of the pass.

Their networks have no batch norm. Here its running statistics are those of the batches that are
trained on, and a short last batch of the pass is filled with examples of the first, which count in
the statistics of the batch alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from reference.federated import Setting, average, cross_entropy, learning_rate
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

ASCENTS = 10


class Memory(NamedTuple):
    """What one step must not unlearn."""

    pseudo: Tensor  # [B, ...]
    soft_labels: Tensor  # [B, C]: what the received model says of the pseudo examples
    perturbed: Tensor  # [B, ...]
    labels: Tensor  # [B]
    count: int  # the first ones that have a loss


def ascend(net: nn.Module, x: Tensor, y: Tensor, step: float) -> Tensor:
    """Raise the loss of every example, each pixel by `step` at a time."""
    for _ in range(ASCENTS):
        moving = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(net(moving), y), moving)
        x = x + step * torch.sign(gradient)
    return x


def make_memory(
    received: nn.Module,
    x: Tensor,
    y: Tensor,
    pseudo_step: float,
    perturbed_step: float,
    count: int,
) -> Memory:
    """From one batch of the client's examples. received: the global model in evaluation mode"""
    pseudo = ascend(received, x, y, pseudo_step)
    with torch.no_grad():
        soft_labels = torch.softmax(received(pseudo), dim=1)
    return Memory(pseudo, soft_labels, ascend(received, x, y, perturbed_step), y, count)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over examples. logits, targets: [B, C]"""
    return -(targets * torch.log_softmax(logits, dim=1)).sum() / len(logits)


def between(w: Tensor, w_old: Tensor, share: float) -> Tensor:
    """The model at `share` of the way from the received to the current parameters."""
    return share * w + (1 - share) * w_old


def gradient_at(net: nn.Module, at: Tensor, x: Tensor, targets: Tensor, count: int) -> Tensor:
    """The gradient of the mean loss of the first examples at a vector of all parameters. targets:
    [B] or [B, C]
    """
    probe = copy.deepcopy(net).train()
    nn.utils.vector_to_parameters(at, probe.parameters())
    loss_of = soft_cross_entropy if targets.dim() == 2 else cross_entropy
    loss = loss_of(probe(x)[:count], targets[:count])
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(probe.parameters())))


def without(way: Tensor, g: Tensor) -> Tensor:
    """The way without its component along g, if the loss whose gradient g is grows on it."""
    overlap = float((way * g).sum())
    # as in their program: a gradient below 1e-15 has no direction
    return way - overlap / (float((g * g).sum()) + 1e-30) * g if overlap > 0 else way


def local_step(
    net: nn.Module,
    w: Tensor,
    w_old: Tensor,
    x: Tensor,
    y: Tensor,
    memory: Memory,
    lr: float,
    gamma: float,
    beta: float,
) -> Tensor:
    """One step from w. -> the next w; all parameters as one vector"""
    pseudo, soft_labels, perturbed, labels, count = memory
    w = w - lr * gradient_at(net, between(w, w_old, gamma), x, y, len(y))
    at = between(w, w_old, beta)
    way = without(w - w_old, gradient_at(net, at, pseudo, soft_labels, count))
    return w_old + without(way, gradient_at(net, at, perturbed, labels, count))


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    gamma: float,
    beta: float,
    pseudo_step: float,
    perturbed_step: float,
) -> dict[str, Tensor]:
    """Run all rounds and return the global state dict. rows: the training examples of each client"""
    state = copy.deepcopy(net.state_dict())
    for round in range(1, setting.rounds + 1):
        key, lr = Key(setting.seed).fold_in("round", round), learning_rate(setting, round)
        cohort = sorted(key.fold_in("cohort").permutation(len(rows))[: setting.cohort].tolist())
        trained = []
        for client in cohort:
            mine, own_key = rows[client], key.fold_in("client", client)
            local = copy.deepcopy(net)
            local.load_state_dict(state)
            received = copy.deepcopy(local).eval()
            order = mine[own_key.fold_in("before", "memory").permutation(len(mine))]
            memories = []
            for first in range(0, len(mine), setting.batch):
                some = np.resize(np.roll(order, -first), setting.batch)
                count = min(setting.batch, len(mine) - first)
                memories.append(
                    make_memory(received, x[some], y[some], pseudo_step, perturbed_step, count)
                )
            plan = plan_batches(
                own_key.fold_in("plan", 0), len(mine), setting.batch, epochs=setting.epochs
            )
            w_old = nn.utils.parameters_to_vector(received.parameters()).detach()
            w = w_old
            for step, (positions, width) in enumerate(
                zip(plan.indices, plan.batch_sizes, strict=True)
            ):
                batch = mine[positions[:width]]
                memory = memories[step % len(memories)]
                nn.utils.vector_to_parameters(w, local.parameters())
                local.train()(x[batch])  # the running statistics of batch norm
                w = local_step(net, w, w_old, x[batch], y[batch], memory, lr, gamma, beta)
            nn.utils.vector_to_parameters(w, local.parameters())
            trained.append({name: value.clone() for name, value in local.state_dict().items()})
        state = average(trained, [1] * len(trained))
    return state
