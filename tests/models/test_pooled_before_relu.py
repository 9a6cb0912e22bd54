"""cnn and lenet apply ReLU after pooling: as published, ReLU comes first, and nothing may tell
the two apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from remanence.models import cnn, lenet


def as_published(model: nn.Module) -> nn.Module:
    """The same weights, every ReLU before its pooling."""
    other = copy.deepcopy(model)
    layers = list(other.body)
    for place in [place for place, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]:
        layers[place], layers[place + 1] = layers[place + 1], layers[place]
    other.body = nn.Sequential(*layers)
    return other


@pytest.mark.parametrize("make", [cnn, lenet])
def test_outputs_and_gradients_agree_bit_for_bit(make: Callable[..., nn.Module]) -> None:
    model = make((3, 32, 32), 10)
    x = torch.randn(16, 3, 32, 32)
    x[4:8] = 0.0  # every pixel alike: all windows are ties, of positive or of negative numbers
    x[8:12, :, :, 16:] = 0.5
    y = torch.arange(16) % 10
    found = []
    for network in (model, as_published(model)):
        logits = network(x)
        nn.functional.cross_entropy(logits, y).backward()
        found.append([logits, *(p.grad for p in network.parameters())])
    assert [type(layer) for layer in as_published(model).body][1:3] == [nn.ReLU, nn.MaxPool2d]
    for ours, published in zip(*found, strict=True):
        assert torch.equal(ours, published)


@pytest.mark.parametrize("make", [cnn, lenet])
def test_a_broken_number_is_passed_on(make: Callable[..., nn.Module]) -> None:
    x = torch.zeros(1, 3, 32, 32)
    x[0, 0, 5, 5] = float("nan")
    assert make((3, 32, 32), 10)(x).isnan().any()
