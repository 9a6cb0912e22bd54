"""The networks of the published jobs, written from their descriptions, with torch alone: every
contender builds them, each in its own environment.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SEED = 0  # of the first weights, which all contenders share


class Center(nn.Module):
    """Pixels from 0 .. 255 to -1 .. 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 127.5) / 127.5


def tutorial_cnn(classes: int) -> nn.Module:
    """The CNN of PyTorch's CIFAR-10 tutorial: 62,006 parameters with ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def pfl_cnn(classes: int) -> nn.Module:
    """The `simple_cnn` of pfl-research's benchmarks: 1,626,442 parameters with ten classes. Its
    weights are Glorot's, its biases torch's own.
    """
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.left = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.left(x) + self.shortcut(x))


def imagenet_resnet18(classes: int) -> nn.Module:
    """torchvision's ResNet-18, as made for ImageNet: a 7x7 stem of stride 2 and a max pooling, so
    that a 32x32 image has one pixel left at the end. 11,181,642 parameters with ten classes.
    """
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        blocks += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    network = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


NETWORKS = {
    "tutorial_cnn": tutorial_cnn,
    "pfl_cnn": pfl_cnn,
    "imagenet_resnet18": imagenet_resnet18,
}


def make_network(name: str, classes: int) -> nn.Module:
    """A network with the first weights that all contenders share."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        return NETWORKS[name](classes)


def set_precision(precision: str) -> None:
    """tf32 or fp32 for everything on a GPU: PyTorch's default is a mixture."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
