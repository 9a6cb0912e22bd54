"""The rounds around local training in plain PyTorch, which the references of single methods share.

As in `reference.federated`, only the random draws come from the package: the clients of each round
and the examples of each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from reference.federated import Setting, average, learning_rate, make_optimizer
from torch import Tensor, nn

from remanence.core.rng import Key
from remanence.data.batches import plan_batches

# (local net, x [n, ...], y [n], positions of each batch, client, learning rate): trains the net in
# place
TrainClient = Callable[[nn.Module, Tensor, Tensor, Sequence[np.ndarray], int, float], None]


def play(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Sequence[np.ndarray],
    setting: Setting,
    train_client: TrainClient,
    by_size: bool = True,
) -> dict[str, Tensor]:
    """Run all rounds and return the global state dict. rows: the training examples of each client;
    by_size: whether clients are weighted by their number of examples
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
            train_client(local, x[mine], y[mine], batches, client, learning_rate(setting, round))
            trained.append(
                {name: value.detach().clone() for name, value in local.state_dict().items()}
            )
        state = average(trained, [len(rows[client]) if by_size else 1 for client in cohort])
    return state


def descend(
    net: nn.Module,
    batches: Sequence[np.ndarray],
    setting: Setting,
    lr: float,
    loss_of: Callable[[np.ndarray], Tensor],
) -> None:
    """Local training by torch's optimizer on the loss of each batch."""
    optimizer = make_optimizer(net, setting, lr)
    net.train()
    for batch in batches:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def features_of(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [B, C] and the inputs of the last linear layer [B, d]."""
    seen: list[Tensor] = []
    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = net(x)
    finally:
        hook.remove()
    return logits, seen[0]


def frozen_copy(net: nn.Module) -> nn.Module:
    """A copy of the model in evaluation mode."""
    with torch.no_grad():
        return copy.deepcopy(net).eval().requires_grad_(False)
