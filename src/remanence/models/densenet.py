"""densenet121: the network in which the authors of FedWAvg count forgetting events."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.models.shapes import at_least_one, check_task, image_sides, parse_widths

# the 1x1 convolution of a layer has this many times the growth as output channels
SQUEEZE = 4


class DenseLayer(nn.Module):
    """BatchNorm, ReLU and a 1x1 convolution, then BatchNorm, ReLU and a 3x3 one; the output is
    concatenated with the input.
    """

    def __init__(self, inputs: int, growth: int):
        super().__init__()
        inside = SQUEEZE * growth
        self.narrow = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, inside, 1, bias=False)
        )
        self.look = nn.Sequential(
            nn.BatchNorm2d(inside), nn.ReLU(), nn.Conv2d(inside, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [B, inputs, h, w] -> [B, inputs + growth, h, w]
        return torch.cat([x, self.look(self.narrow(x))], dim=1)


def halve(inputs: int, outputs: int) -> nn.Module:
    """Return the transition between two blocks: fewer channels and half the resolution, rounded up
    so that 28x28 images can be halved three times.
    """
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.AvgPool2d(2, stride=2, ceil_mode=True),
    )


class DenseNet(nn.Module):
    """A 3x3 stem, dense blocks with transitions between them, global average pooling, and the
    classifier.
    """

    def __init__(self, channels: int, blocks: tuple[int, ...], growth: int, classes: int):
        super().__init__()
        width = 2 * growth
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=nn.Conv2d(channels, width, 3, padding=1, bias=False)
        )
        for number, depth in enumerate(blocks):
            for layer in range(depth):
                layers[f"block{number}_{layer}"] = DenseLayer(width, growth)
                width += growth
            if number + 1 < len(blocks):
                layers[f"halve{number}"] = halve(width, width // 2)
                width //= 2
        layers["end"] = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(layers)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.body(x)  # [B, last width, h', w']
        return maps.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def densenet121(
    shape: tuple[int, ...], classes: int, *, growth: int = 32, blocks: PlainText = "6,12,24,16"
) -> nn.Module:
    """DenseNet-121 for small images: the input of a layer is the output of all previous layers of
    its block.

    Huang, Liu, van der Maaten and Weinberger, Densely Connected Convolutional Networks, 2017; used
    by Hong, Kang and Lee, 2022 (FedWAvg), table 1. The published network begins with a 7x7
    convolution of stride 2 and a pooling, made for 224x224 images; on 28x28 and 32x32 ones that
    would leave a single pixel, so we use a 3x3 convolution of stride 1 (FedWAvg does not specify
    it). 6,956,298 parameters on 3x32x32 with 10 classes. Smaller versions:
    `densenet121(growth=12)`, `densenet121(growth=8, blocks="2,2,2,2")`.

    Args:
        shape: (channels, height, width), both sides at least 9, so that the last map is 2x2 or
            larger and BatchNorm can train on a batch of one.
        classes: the number of classes.
        growth: channels that each layer adds; the stem has twice as many.
        blocks: layers of each of the four dense blocks, separated by commas; the published network
            has 121 layers in all.
    """
    check_task("densenet121", shape, classes)
    channels, _, _ = image_sides(
        "densenet121", shape, smallest=9, reason="three halvings with BatchNorm"
    )
    depths = parse_widths("densenet121", "blocks", blocks)
    if len(depths) != 4:
        raise InputError(
            f"model densenet121: blocks={blocks!r} names {len(depths)} blocks, not 4; write it"
            " like blocks='6,12,24,16'"
        )
    return DenseNet(channels, depths, at_least_one("densenet121", "growth", growth), classes)
