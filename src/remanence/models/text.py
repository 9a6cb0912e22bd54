"""text: the mean of token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from remanence.core.errors import InputError
from remanence.models.shapes import at_least_one, check_task


class Text(nn.Module):
    """The mean of the token embeddings, one dense layer, and the classifier; token ids are below
    `vocabulary`.
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
    """The mean of the token embeddings, one hidden layer with ReLU, and the classifier; the order
    of the tokens is not used.

    After Joulin et al., Bag of Tricks for Efficient Text Classification, 2017, with one hidden
    layer added.

    Args:
        shape: (length,) of one example of int64 token ids; padding tokens are averaged like others.
        classes: the number of classes.
        width: of the embeddings and of the hidden layer.
        vocabulary: the number of token ids, from 0 to vocabulary - 1. The experiment compares the
            largest id of the data with the attribute `vocabulary` before training starts.
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
