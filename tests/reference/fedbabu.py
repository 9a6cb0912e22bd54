"""FedBABU (Oh et al. 2022, algorithm 1) and the frozen head reimplemented in plain PyTorch and
explicit loops; only the random draws come from the package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from reference import federated
from reference.federated import Setting, cross_entropy, learning_rate
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches


def train(
    net: nn.Module,
    head: nn.Module,
    x: Tensor,
    y: Tensor,
    classes: int,
    rows: Sequence[np.ndarray],
    setting: Setting,
) -> dict[str, Tensor]:
    """Federated training of the body; the head, a module of the net, keeps its random values.
    Returns the global state dict.
    """
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    return federated.train(net, x, y, classes, rows, setting)


def personalize(
    net: nn.Module,
    state: dict[str, Tensor],
    tuned: Sequence[str],
    x: Tensor,
    y: Tensor,
    mine: np.ndarray,
    client: int,
    epochs: int,
    setting: Setting,
) -> nn.Module:
    """One client's model: the global one, with the parameters named `tuned` trained on its examples
    after the last round.
    """
    local = copy.deepcopy(net)
    local.load_state_dict(state)
    for name, parameter in local.named_parameters():
        parameter.requires_grad_(name in tuned)
    lr = learning_rate(setting, setting.rounds)
    optimizer = torch.optim.SGD(
        [p for p in local.parameters() if p.requires_grad],
        lr=lr,
        momentum=setting.momentum,
        weight_decay=setting.weight_decay,
    )
    key = Key(setting.seed).fold_in(
        "round", setting.rounds, "personal", "client", client, "plan", 0
    )
    plan = plan_batches(key, len(mine), setting.batch, epochs=epochs)
    local.train()
    for positions, width in zip(plan.indices, plan.batch_sizes, strict=True):
        batch = mine[positions[:width]]
        optimizer.zero_grad()
        cross_entropy(local(x[batch]), y[batch]).backward()
        optimizer.step()
    return local.eval()


def count(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, float]:
    """Return the number of correct examples and their summed cross-entropy."""
    right, loss = 0, 0.0
    for row, label in zip(x, y, strict=True):
        with torch.no_grad():
            logits = model(row.unsqueeze(0))
        right += int(logits.argmax()) == int(label)
        loss += float(cross_entropy(logits, label.unsqueeze(0)))
    return right, loss
