"""What a client computes alone and with its peers' models, in explicit loops: local training,
evaluation, and averaging weighted by data.

Neither the package nor torch's optimizers are used here: the update rules are written out parameter
by parameter. A model is a state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Rows = tuple[Tensor, Tensor]  # x [n, ...], y [n]
Loss = Callable[[Tensor, Tensor], Tensor]  # logits [B, C], labels [B] -> scalar


@dataclass(frozen=True)
class Training:
    """How a client trains; every call has a new optimizer."""

    optimizer: str = "adam"  # adam | sgd
    lr: float = 0.001
    momentum: float = 0.0  # sgd
    beta1: float = 0.9  # adam
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    # the learning rate of a round, if it changes; the training before round 1 is round 0
    rate: Callable[[int], float] | None = None

    def rate_of(self, round: int) -> float:
        return self.lr if self.rate is None else self.rate(round)


def clone(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def equip(net: nn.Module, state: State) -> nn.Module:
    """A new copy of the network with these weights."""
    equipped = copy.deepcopy(net)
    equipped.load_state_dict(state)
    return equipped


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the label's share of the sum of exponentials, as a mean over the examples."""
    total = logits.new_zeros(())
    for row, label in zip(logits, labels.tolist(), strict=True):
        total = total - torch.log(
            torch.exp(row[label] - row.max()) / torch.exp(row - row.max()).sum()
        )
    return total / len(labels)


def look(net: nn.Module, state: State, rows: Rows) -> Tensor:
    """Logits [n, C] of a model in evaluation mode."""
    evaluated = equip(net, state).eval()
    with torch.no_grad():
        logits: Tensor = evaluated(rows[0])
    return logits


def mean_loss(net: nn.Module, state: State, rows: Rows) -> float:
    return float(cross_entropy(look(net, state, rows), rows[1]))


def mean_error(net: nn.Module, state: State, rows: Rows) -> float:
    """The fraction of wrong examples."""
    wrong = 0
    for row, label in zip(look(net, state, rows).tolist(), rows[1].tolist(), strict=True):
        wrong += row.index(max(row)) != label
    return wrong / len(rows[1])


def train(
    net: nn.Module,
    state: State,
    batches: Sequence[Rows],
    how: Training,
    round: int,
    names: Sequence[str] | None = None,
    loss: Loss = cross_entropy,
) -> State:
    """Train one local phase and return the new model. names: the trained parameters; None: all"""
    local = equip(net, state).train()
    lr, momentum, beta1, beta2 = how.rate_of(round), how.momentum, how.beta1, how.beta2
    velocity: State = {}
    first: State = {}
    second: State = {}
    for step, (x, y) in enumerate(batches, start=1):
        local.zero_grad()
        loss(local(x), y).backward()
        with torch.no_grad():
            for name, weight in local.named_parameters():
                if names is not None and name not in names:
                    continue
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradient = gradient + how.weight_decay * weight
                if how.optimizer == "sgd":
                    velocity[name] = (
                        momentum * velocity.get(name, torch.zeros_like(weight)) + gradient
                    )
                    weight.sub_(lr * velocity[name])
                else:
                    first[name] = (
                        beta1 * first.get(name, torch.zeros_like(weight)) + (1 - beta1) * gradient
                    )
                    second[name] = (
                        beta2 * second.get(name, torch.zeros_like(weight))
                        + (1 - beta2) * gradient**2
                    )
                    unbiased_first = first[name] / (1 - beta1**step)
                    unbiased_second = second[name] / (1 - beta2**step)
                    weight.sub_(lr * unbiased_first / (torch.sqrt(unbiased_second) + how.eps))
    return clone(local.state_dict())


def mix(
    mine: State,
    theirs: Sequence[State],
    my_size: int,
    their_sizes: Sequence[int],
    names: Sequence[str] | None = None,
) -> State:
    """(n_k w_k + sum_j n_j w_j) / (n_k + sum_j n_j) over the named entries; for a counter of
    batches, the largest.
    """
    mixed = clone(mine)
    total = my_size + sum(their_sizes)
    for name in mine if names is None else names:
        if not mine[name].is_floating_point():
            for state in theirs:
                mixed[name] = torch.maximum(mixed[name], state[name])
            continue
        mixed[name] = my_size / total * mine[name]
        for state, size in zip(theirs, their_sizes, strict=True):
            mixed[name] = mixed[name] + size / total * state[name]
    return mixed


def names_of_last_layers(net: nn.Module, depth: int) -> list[str]:
    """The parameters of the last `depth` layers, counted from the output; a layer is a module
    with parameters of its own.
    """
    layers = []
    for path, module in net.named_modules():
        own = [
            f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)
        ]
        if own:
            layers.append(own)
    names = []
    for layer in layers[len(layers) - depth :] if depth < len(layers) else layers:
        names += layer
    return names
