"""text: a bag of word vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.models.shapes import at_least_one, check_task


class Text(nn.Module):
    """The mean of the tokens' vectors, one dense layer, and the classifier; `vocabulary` bounds
    the token ids it can read.
    """

    def __init__(self, vocabulary: int, width: int, classes: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(x)  # [B, length] int64 -> [B, length, width]
        return torch.relu(self.hidden(vectors.mean(dim=1)))  # [B, width]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))  # [B, classes]
        return logits


def text(
    shape: tuple[int, ...], classes: int, *, width: int = 32, vocabulary: int = 1000
) -> nn.Module:
    """The mean of the tokens' vectors, one hidden layer with ReLU, and the classifier; the order of
    the words is lost.

    After Joulin et al., Bag of Tricks for Efficient Text Classification, 2017, with one hidden
    layer added.

    shape: (length,) of one example of int64 token ids; padding tokens are averaged like any other.
    classes: how many labels there are.
    width: of the token vectors and of the hidden layer.
    vocabulary: how many different token ids there are; ids run from 0 to vocabulary - 1. The
        network cannot see the data, so whoever holds them compares their largest id with the
        attribute `vocabulary` before work starts.
    """
    check_task("text", shape, classes)
    if len(shape) != 1:
        raise InputError(
            f"model text: an example of {len(shape)} dimensions is not a sequence of tokens;"
            " use cnn or mlp for images"
        )
    return Text(
        at_least_one("text", "vocabulary", vocabulary),
        at_least_one("text", "width", width),
        classes,
    )
