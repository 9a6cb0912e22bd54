from __future__ import annotations

import pytest
import torch
from torch import nn

from remanence.models import lenet


@pytest.mark.parametrize(
    ("side", "classes", "layers", "total"),
    [
        # Table A.2: 456 = 25*3*6+6, 2,416 = 25*6*16+16, 48,120 = 400*120+120, 10,164 = 120*84+84,
        # 850 = 84*10+10
        (32, 10, [456, 2416, 48120, 10164, 850], 62_006),
        # Table A.3: the same up to the classifier, 595 = 84*7+7
        (227, 7, [456, 2416, 48120, 10164, 595], 61_751),
    ],
)
def test_published_counts(side: int, classes: int, layers: list[int], total: int) -> None:
    model = lenet((3, side, side), classes)
    weights = list(model.parameters())
    assert [weights[i].numel() + weights[i + 1].numel() for i in range(0, 10, 2)] == layers
    assert sum(p.numel() for p in weights) == total == sum(layers)


@pytest.mark.parametrize(
    ("side", "maps"),
    [(32, [(6, 28), (6, 14), (16, 10), (16, 5)]), (227, [(6, 75), (6, 37), (16, 11), (16, 5)])],
)
def test_published_output_sizes(side: int, maps: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []
    model = lenet((3, side, side), 7)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.MaxPool2d):
            module.register_forward_hook(
                lambda module, inputs, output: seen.append((output.shape[1], output.shape[3]))
            )
    model(torch.zeros(1, 3, side, side))
    assert seen == maps


def test_same_function_written_out_with_relu_after_every_hidden_layer() -> None:
    torch.manual_seed(0)
    model = lenet((3, 32, 32), 10).double()
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = model.parameters()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    h = nn.functional.max_pool2d(torch.conv2d(x, w1, b1).clamp(min=0), 2)
    h = nn.functional.max_pool2d(torch.conv2d(h, w2, b2).clamp(min=0), 2)
    h = (h.reshape(2, 400) @ w3.T + b3).clamp(min=0)
    h = (h @ w4.T + b4).clamp(min=0)
    torch.testing.assert_close(model(x), h @ w5.T + b5, rtol=1e-12, atol=1e-12)
    assert model.features(x).shape == (2, 84)


def test_stride_changes_at_128_pixels_of_the_shorter_side() -> None:
    strides = {
        side: [m.stride for m in lenet((1, side, 300), 2).modules() if isinstance(m, nn.Conv2d)]
        for side in (127, 128)
    }
    assert strides == {127: [(1, 1), (1, 1)], 128: [(3, 3), (3, 3)]}
