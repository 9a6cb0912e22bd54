"""shallow_resnet: the shallow ResNet of the FedWAvg paper."""

from __future__ import annotations

from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.models.resnet import ResidualBlock, batch_norm
from remanence.models.shapes import check_task, image_sides, parse_widths


class ShallowResNet(nn.Module):
    """A 3x3 stem, one residual block per width, global average pooling, and the classifier."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int):
        super().__init__()
        # BatchNorm subtracts the mean, so a bias before it has no effect.
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
            batch_norm(widths[0]),
            nn.ReLU(),
        )
        before = (widths[0], *widths[:-1])
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(
                    inputs, outputs, 1 if block == 0 else 2, batch_norm, batch_norm, bias=False
                )
                for block, (inputs, outputs) in enumerate(zip(before, widths, strict=True))
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.blocks(self.stem(x))  # [B, last width, h', w']
        return maps.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def shallow_resnet(
    shape: tuple[int, ...], classes: int, *, widths: PlainText = "64,128,256,512"
) -> nn.Module:
    """Four residual blocks with BatchNorm, global average pooling, and one linear layer.

    Hong, Kang and Lee, Weighted Averaging Federated Learning Based on Example Forgetting Events in
    Label Imbalanced Non-IID, 2022 (FedWAvg), section 3.3: "four residual blocks" of two 3x3
    convolutions with BatchNorm, and "three shortcut connections" of a 1x1 convolution with
    BatchNorm. The paper leaves the rest open. Our choices: three such shortcuts for four blocks
    mean that the first block has the width of its input, hence a stem (3x3 convolution, BatchNorm,
    ReLU) comes before it and its shortcut is the identity; each later block halves the resolution
    and takes the next width; convolutions have no bias, as in He et al., Deep Residual Learning for
    Image Recognition, 2016.

    Args:
        shape: (channels, height, width), both sides at least 9, so that the last map is 2x2 or
            larger and BatchNorm can train on a batch of one.
        classes: the number of classes.
        widths: channels of the four blocks, separated by commas (not in the paper).
    """
    check_task("shallow_resnet", shape, classes)
    channels, _, _ = image_sides(
        "shallow_resnet", shape, smallest=9, reason="three halvings with BatchNorm"
    )
    blocks = parse_widths("shallow_resnet", "widths", widths)
    if len(blocks) != 4:
        raise InputError(
            f"model shallow_resnet: widths={widths!r} names {len(blocks)} blocks, not 4;"
            " write it like widths='64,128,256,512'"
        )
    return ShallowResNet(channels, blocks, classes)
