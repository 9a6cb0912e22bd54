"""resnet18: the ResNet-18 of the WSM thesis, and its residual block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from remanence.core.errors import InputError, unknown
from remanence.core.expressions import PlainText
from remanence.models.shapes import at_least_one, check_task, image_sides

Norm = Callable[[int], nn.Module]  # channels -> a normalization layer


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


# norm option -> (after a block's first convolution and after the stem, after a block's second
# convolution and on its shortcut)
NORMS: dict[str, tuple[Norm, Norm]] = {
    "mixed": (batch_norm, group_norm),
    "batch": (batch_norm, batch_norm),
    "group": (group_norm, group_norm),
}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, first: Norm, second: Norm, bias: bool
    ):
        super().__init__()
        self.left = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=bias),
            first(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias),
            second(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=bias), second(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        # [B, inputs, h, w] -> [B, outputs, ceil(h/stride), ceil(w/stride)]
        return torch.relu(self.left(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """A 3x3 stem, four stages of two residual blocks, average pooling, and the classifier."""

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        classes: int,
        first: Norm,
        second: Norm,
        filters: int,
    ):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, filters, 3, padding=1), first(filters), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = filters
        for stage in range(4):
            outputs = filters * 2**stage
            blocks.append(
                ResidualBlock(inputs, outputs, 1 if stage == 0 else 2, first, second, bias=True)
            )
            blocks.append(ResidualBlock(outputs, outputs, 1, first, second, bias=True))
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AvgPool2d(3, stride=2)
        self.head = nn.Linear(inputs * _side_left(height) * _side_left(width), classes)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.pool(self.blocks(self.stem(x)))  # [B, 8 filters, pooled h, pooled w]
        return maps.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def _side_left(side: int) -> int:
    """Return the side of the feature map after three halvings, rounded up, and the unpadded
    pooling, rounded down.
    """
    return (-(-side // 8) - 3) // 2 + 1


def resnet18(
    shape: tuple[int, ...], classes: int, *, norm: PlainText = "mixed", width: int = 64
) -> nn.Module:
    """ResNet-18 for small images, with batch and group normalization mixed in one block.

    Legate, Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning, 2022
    (WSM), appendix B, layer by layer: every convolution has a bias; BatchNorm after the stem and
    after a block's first convolution, GroupNorm with 2 groups after its second and on the 1x1
    shortcuts; 3x3 average pooling with stride 2, which on 32x32 images reads the upper left 3x3 of
    the last 4x4 map, as printed. "BatchNorm2d(64)" inside the wider blocks is a misprint.
    11,178,762 parameters on 3x32x32 with 10 classes.

    Args:
        shape: (channels, height, width), both sides at least 17; up to 32 pixels the classifier
            gets one pooled position, above that several.
        classes: the number of classes.
        norm: "mixed" as above, or "batch" or "group" for one kind everywhere (the norm study, table
            3.3).
        width: channels of the first stage, doubled at each later one; the thesis has 64.
    """
    check_task("resnet18", shape, classes)
    channels, height, side = image_sides(
        "resnet18", shape, smallest=17, reason="three halvings and a 3x3 pooling"
    )
    if norm not in NORMS:
        raise unknown("norm of resnet18", norm, NORMS)
    if at_least_one("resnet18", "width", width) % 2 and norm != "batch":
        raise InputError(
            f"model resnet18: width={width} cannot be split into 2 groups; give an even width"
            " or norm='batch'"
        )
    return ResNet18(channels, height, side, classes, *NORMS[norm], filters=width)
