"""The papers' networks.

Each is built by a function `name(shape, classes, *, options)` where `shape` is one example's:
(channels, height, width) for images, (columns,) for tables, (length,) for tokens. The network it
returns has `features(x) -> [B, d]`, an `nn.Linear` called `head`, and `forward(x) =
head(features(x))`; its layers are registered in the order in which they are applied, so that "the
last three layers" is a question of counting. None has dropout or changes a tensor in place, except
for BatchNorm's own buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from remanence.core.errors import unknown
from remanence.models.cnn import cnn
from remanence.models.densenet import densenet121
from remanence.models.lenet import LARGE, lenet
from remanence.models.mlp import mlp
from remanence.models.resnet import resnet18
from remanence.models.shallow_resnet import shallow_resnet
from remanence.models.text import text

__all__ = [
    "MODELS",
    "cnn",
    "default_model",
    "densenet121",
    "lenet",
    "mlp",
    "resnet18",
    "shallow_resnet",
    "text",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "densenet121": densenet121,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18": resnet18,
    "shallow_resnet": shallow_resnet,
    "text": text,
}

_KINDS = ("image", "table", "tokens")
_SMALL = 16  # pixels: below this a convolution sees hardly more than a dense layer does


def default_model(kind: str, name: str, shape: tuple[int, ...]) -> str:
    """The network to use where the experiment names none: a key of `MODELS` that fits the shape.

    >>> default_model("image", "cifar10", (3, 32, 32)), default_model("image", "digits", (1, 8, 8))
    ('cnn', 'mlp')

    kind: "image", "table" or "tokens".
    name: of the data set; "digits" and "pacs" have a default of their own.
    shape: of one example.
    """
    if kind not in _KINDS:
        raise unknown("kind of data", kind, _KINDS)
    if kind == "tokens":
        return "text"
    if kind == "table" or len(shape) != 3 or name == "digits" or min(shape[1:]) < _SMALL:
        return "mlp"
    # On large images the dense layer of cnn would alone have 100 million weights.
    return "lenet" if name == "pacs" or min(shape[1:]) >= LARGE else "cnn"
