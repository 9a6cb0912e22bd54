"""The smallest network: logits (u x, -u x) for an input x, so that a model is the single number u
and results can be computed by hand.

For an input x = 1 its cross-entropy is softplus(-2u) for label 0 and softplus(2u) for label 1, and
softplus(2u) = 2u + softplus(-2u).
"""

from __future__ import annotations

import math

import pytest
import torch
from reference.gossip import Rows, State, Training
from torch import nn

PLAIN = Training("sgd", lr=1.0)


def rows(*labels: int, x: float = 1.0) -> Rows:
    return torch.full((len(labels), 1), x, dtype=torch.float64), torch.tensor(labels)


def softplus(z: float) -> float:
    return math.log(1 + math.exp(z))


def make_net(u: float = 0.0) -> nn.Module:
    net = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[u], [-u]]))
    return net


def state_of(u: float) -> State:
    return make_net(u).state_dict()


def number(state: State) -> float:
    assert float(state["weight"][0]) == pytest.approx(-float(state["weight"][1]))
    return float(state["weight"][0])
