"""resnet18 against appendix B of the thesis, typed in here line by line as (kind, inputs,
outputs, kernel, stride).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from remanence.models import resnet18


def printed_block(inputs: int, outputs: int, stride: int) -> list[tuple[object, ...]]:
    block: list[tuple[object, ...]] = [
        ("conv", inputs, outputs, 3, stride),
        ("batch", outputs),
        ("conv", outputs, outputs, 3, 1),
        ("group", outputs),
    ]
    if stride == 2:
        block += [("conv", inputs, outputs, 1, 2), ("group", outputs)]
    return block


PRINTED: list[tuple[object, ...]] = [
    ("conv", 3, 64, 3, 1),
    ("batch", 64),
    *printed_block(64, 64, 1),
    *printed_block(64, 64, 1),
    *printed_block(64, 128, 2),
    *printed_block(128, 128, 1),
    *printed_block(128, 256, 2),
    *printed_block(256, 256, 1),
    *printed_block(256, 512, 2),
    *printed_block(512, 512, 1),
    ("linear", 512, 10),
]


def layers_of(model: nn.Module) -> list[tuple[object, ...]]:
    layers: list[tuple[object, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is not None
            assert module.padding == (module.kernel_size[0] // 2,) * 2
            layers.append(
                (
                    "conv",
                    module.in_channels,
                    module.out_channels,
                    module.kernel_size[0],
                    module.stride[0],
                )
            )
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum, module.affine, module.track_running_stats) == (
                1e-5,
                0.1,
                True,
                True,
            )
            layers.append(("batch", module.num_features))
        elif isinstance(module, nn.GroupNorm):
            assert (module.eps, module.affine, module.num_groups) == (1e-5, True, 2)
            layers.append(("group", module.num_channels))
        elif isinstance(module, nn.Linear):
            layers.append(("linear", module.in_features, module.out_features))
    return layers


@pytest.fixture(scope="module")
def thesis_model() -> nn.Module:
    with torch.device("meta"):  # shapes only: 11 million numbers need not be drawn
        return resnet18((3, 32, 32), 10)


def test_layers_are_those_of_the_printed_list(thesis_model: nn.Module) -> None:
    assert layers_of(thesis_model) == PRINTED
    pools = [
        (m.kernel_size, m.stride, m.padding)
        for m in thesis_model.modules()
        if isinstance(m, nn.AvgPool2d)
    ]
    assert pools == [(3, 2, 0)]


def test_parameter_count_by_hand(thesis_model: nn.Module) -> None:
    """A convolution has k*k*in*out weights and out biases, a norm 2*channels numbers.

    stem      9*3*64+64 = 1,792 and 128
    =     1,920 layer 1   four convolutions of 9*64*64+64 = 36,928 and four norms of 128
    =   148,224 layer 2   9*64*128+128 = 73,856; three of 9*128*128+128 = 147,584; four norms of
    256;
              shortcut 64*128+128 = 8,320 and 256
              =   526,208
    layer 3   9*128*256+256 = 295,168; three of 9*256*256+256 = 590,080; four norms of 512;
              shortcut 128*256+256 = 33,024 and 512
              = 2,100,992
    layer 4   9*256*512+512 = 1,180,160; three of 9*512*512+512 = 2,359,808; four norms of 1,024;
              shortcut 256*512+512 = 131,584 and 1,024
              = 8,396,288
    fc        512*10+10
    =     5,130
    """
    by_hand = (
        (1_792 + 128)
        + (4 * 36_928 + 4 * 128)
        + (73_856 + 3 * 147_584 + 4 * 256 + 8_320 + 256)
        + (295_168 + 3 * 590_080 + 4 * 512 + 33_024 + 512)
        + (1_180_160 + 3 * 2_359_808 + 4 * 1_024 + 131_584 + 1_024)
        + 5_130
    )
    assert by_hand == 1_920 + 148_224 + 526_208 + 2_100_992 + 8_396_288 + 5_130 == 11_178_762
    assert sum(p.numel() for p in thesis_model.parameters()) == by_hand


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_variants_have_one_norm_everywhere(norm: str) -> None:
    with torch.device("meta"):
        layers = layers_of(resnet18((3, 32, 32), 10, norm=norm))
    assert layers == [
        (norm, *layer[1:]) if layer[0] in ("batch", "group") else layer for layer in PRINTED
    ]


def test_same_function_written_out() -> None:
    torch.manual_seed(0)
    model = resnet18((2, 32, 32), 3, width=4).double().train()
    x = torch.randn(3, 2, 32, 32, dtype=torch.float64)
    weights = iter(model.parameters())

    def convolve(h: Tensor, stride: int = 1) -> Tensor:
        weight, bias = next(weights), next(weights)
        return torch.conv2d(h, weight, bias, stride=stride, padding=weight.shape[-1] // 2)

    def normalize(h: Tensor, over: tuple[int, ...]) -> Tensor:
        weight, bias = next(weights), next(weights)
        h = (h - h.mean(over, keepdim=True)) / (
            h.var(over, keepdim=True, unbiased=False) + 1e-5
        ).sqrt()
        return (
            h.reshape(x.shape[0], weight.shape[0], *h.shape[-2:]) * weight[:, None, None]
            + bias[:, None, None]
        )

    def batch(h: Tensor) -> Tensor:
        return normalize(h, (0, 2, 3))

    def group(h: Tensor) -> Tensor:
        return normalize(h.reshape(h.shape[0], 2, h.shape[1] // 2, *h.shape[2:]), (2, 3, 4))

    h = batch(convolve(x)).clamp(min=0)
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        left = group(convolve(batch(convolve(h, stride)).clamp(min=0)))
        h = (left + (group(convolve(h, stride)) if stride == 2 else h)).clamp(min=0)
    assert h.shape == (3, 32, 4, 4)
    pooled = h[:, :, :3, :3].mean((2, 3))
    torch.testing.assert_close(model.features(x), pooled, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model(x), pooled @ next(weights).T + next(weights), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("side", "features"), [(17, 512), (28, 512), (32, 512), (33, 512 * 4), (64, 512 * 9)]
)
def test_classifier_sees_the_pooled_positions(side: int, features: int) -> None:
    """The last map has ceil(side/8) rows: 3, 4, 4, 5, 8; 3x3 pooling with stride 2 leaves 1, 1,
    1, 2, 3.
    """
    with torch.device("meta"):
        assert resnet18((3, side, side), 10).head.in_features == features
