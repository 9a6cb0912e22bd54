"""lenet: the small convolutional network of the HAST thesis."""

from __future__ import annotations

from torch import Tensor, nn

from remanence.models.shapes import check_task, image_sides

LARGE = 128  # pixels: from this size on the convolutions have stride 3


def _side_left(side: int, stride: int) -> int:
    """Return the side of the feature map after two unpadded 5x5 convolutions with 2x2 pooling."""
    for _ in range(2):
        side = ((side - 5) // stride + 1) // 2
    return side


class LeNet(nn.Module):
    """Two unpadded 5x5 convolutions with max pooling and two dense layers; pooled before ReLU,
    as in `cnn.py`.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int):
        super().__init__()
        stride = 3 if min(height, width) >= LARGE else 1
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 5, stride=stride),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5, stride=stride),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * _side_left(height, stride) * _side_left(width, stride), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        self.head = nn.Linear(84, classes)

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)  # [B, c, h, w] -> [B, 84]
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions (6 and 16 channels) with 2x2 max pooling, dense layers of 120 and 84,
    and the classifier.

    Klefbom and Örtenberg Toftås, Decentralized Deep Learning under Distributed Concept Drift, 2023
    (HAST), appendix A.2: 62,006 parameters on 3x32x32 with 10 classes; 61,751 on 3x227x227 with 7
    classes, where both convolutions have stride 3. ReLU follows every hidden layer: the tables
    print "Linear" for the dense ones, the authors' code has ReLU.

    Args:
        shape: (channels, height, width), both sides at least 16; if both are 128 or more, the
            stride is 3 instead of 1.
        classes: the number of classes.
    """
    check_task("lenet", shape, classes)
    channels, height, width = image_sides(
        "lenet", shape, smallest=16, reason="two 5x5 convolutions with pooling"
    )
    return LeNet(channels, height, width, classes)
