"""The networks of the papers, one file each: `cnn`, `lenet`, `mlp`, `resnet`, `shallow_resnet`,
`densenet` and `text`. `MODELS` lists them; `shapes` checks the shape of an example.

Each is built by a function `name(shape, classes, *, options)`, where `shape` is that of one
example: (channels, height, width) for images, (columns,) for tables, (length,) for tokens. The
network has `features(x) -> [B, d]`, an `nn.Linear` called `head`, and `forward(x) =
head(features(x))`. Layers are registered in the order in which they are applied, so that "the last
three layers" can be counted. No network has dropout or changes a tensor in place, except for the
buffers of BatchNorm.

This package imports from `remanence.core` only. Begin with `cnn`.
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

_KINDS = ("image", "table", "tokens", "sequence", "volume")
_SMALL = 16  # pixels: below this a convolution is hardly better than a dense layer


def default_model(kind: str, name: str, shape: tuple[int, ...]) -> str:
    """Return the network of an experiment that names none: a key of `MODELS` that fits the shape.

    >>> default_model("image", "cifar10", (3, 32, 32)), default_model("image", "digits", (1, 8, 8))
    ('cnn', 'mlp')

    Args:
        kind: "image", "table", "tokens", "sequence" or "volume".
        name: of the dataset; "digits" and "pacs" have their own default.
        shape: of one example.
    """
    if kind not in _KINDS:
        raise unknown("kind of data", kind, _KINDS)
    if kind == "tokens":
        return "text"
    if kind != "image" or len(shape) != 3 or name == "digits" or min(shape[1:]) < _SMALL:
        return "mlp"
    # On large images the dense layer of cnn would have 100 million weights.
    return "lenet" if name == "pacs" or min(shape[1:]) >= LARGE else "cnn"
