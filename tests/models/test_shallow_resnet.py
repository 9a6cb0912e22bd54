from __future__ import annotations

import torch
from torch import Tensor, nn

from remanence.models import shallow_resnet


def test_layers_are_what_the_paper_counts() -> None:
    """Four blocks of two 3x3 convolutions, a 3x3 stem, three 1x1 shortcuts, a BatchNorm for
    each of the twelve, one linear layer.
    """
    with torch.device("meta"):
        model = shallow_resnet((3, 32, 32), 10)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.kernel_size[0] for m in convolutions] == [3, 3, 3, 3, 3, 1, 3, 3, 1, 3, 3, 1]
    assert [m.out_channels for m in convolutions] == [
        64,
        64,
        64,
        *[128] * 3,
        *[256] * 3,
        *[512] * 3,
    ]
    assert [m.stride[0] for m in convolutions] == [1, 1, 1, 2, 1, 2, 2, 1, 2, 2, 1, 2]
    assert [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [
        m.out_channels for m in convolutions
    ]
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 1


def test_parameter_count_by_hand() -> None:
    """Convolutions without bias, norms of 2 numbers a channel, widths 2 3 4 5, one input channel, 7
    classes.

    stem      9*1*2 + 4                       =  22
    block 1   9*(2*2 + 2*2) + 2*4             =  80
    block 2   9*(2*3 + 3*3) + 2*3 + 3*6       = 159
    block 3   9*(3*4 + 4*4) + 3*4 + 3*8       = 288
    block 4   9*(4*5 + 5*5) + 4*5 + 3*10      = 455
    head      5*7 + 7                         =  42
    """
    model = shallow_resnet((1, 9, 9), 7, widths="2,3,4,5")
    assert sum(p.numel() for p in model.parameters()) == 22 + 80 + 159 + 288 + 455 + 42 == 1_046


def test_equal_widths_keep_three_shortcuts() -> None:
    model = shallow_resnet((1, 9, 9), 7, widths="2,2,2,2")
    assert [len(block.shortcut) for block in model.blocks] == [0, 2, 2, 2]


def test_same_function_written_out() -> None:
    torch.manual_seed(0)
    model = shallow_resnet((2, 11, 9), 3, widths="2,3,4,5").double().train()
    x = torch.randn(3, 2, 11, 9, dtype=torch.float64)
    weights = iter(model.parameters())

    def layer(h: Tensor, stride: int = 1) -> Tensor:
        kernel, weight, bias = next(weights), next(weights), next(weights)
        h = torch.conv2d(h, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        h = (h - h.mean((0, 2, 3), keepdim=True)) / (
            h.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5
        ).sqrt()
        return h * weight[:, None, None] + bias[:, None, None]

    h = layer(x).clamp(min=0)
    for stride in (1, 2, 2, 2):
        left = layer(layer(h, stride).clamp(min=0))
        h = (left + (layer(h, stride) if stride == 2 else h)).clamp(min=0)
    assert h.shape == (3, 5, 2, 2)
    torch.testing.assert_close(
        model(x), h.mean((2, 3)) @ next(weights).T + next(weights), rtol=1e-12, atol=1e-12
    )
