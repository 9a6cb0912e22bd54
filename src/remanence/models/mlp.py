"""mlp: dense layers on the flattened example."""

from __future__ import annotations

import math

from torch import Tensor, nn

from remanence.core.expressions import PlainText
from remanence.models.shapes import check_task, parse_widths


class Mlp(nn.Module):
    """Dense layers with ReLU, then the classifier."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int):
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x.flatten(1))  # [B, ...] -> [B, last hidden width]
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def mlp(shape: tuple[int, ...], classes: int, *, hidden: PlainText = "200") -> nn.Module:
    """Dense layers with ReLU on the flattened example: for tables and for small images.

    `hidden="200,200"` on 28x28 images is the "2NN" of McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data, 2017.

    Args:
        shape: of one example of floating-point numbers; it is flattened.
        classes: the number of classes.
        hidden: the widths of the hidden layers from input to output, separated by commas; empty:
            none, which is logistic regression.
    """
    check_task("mlp", shape, classes)
    return Mlp(math.prod(shape), parse_widths("mlp", "hidden", hidden), classes)
