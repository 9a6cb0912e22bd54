"""What a user's network returns, and what it draws: logits in any wrapping, and random numbers from
a generator that is seeded for each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from remanence.core.errors import InputError


def logits_of(output: Any) -> Tensor:
    """The logits in the output of a network: the tensor itself, `.logits`, the entry "logits", or
    the first tensor of a tuple, list or dictionary.

    >>> logits_of({"loss": None, "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    named = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        named = output.get("logits", named)
    if isinstance(named, Tensor):
        return named
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list) or isinstance(output, Mapping):
        first = next((value for value in values if isinstance(value, Tensor)), None)
        if first is not None:
            return first
    raise InputError(
        f"the model returns {type(output).__name__} without a tensor of logits: wrap it in a module"
        " that returns one number for each class"
    )


@contextlib.contextmanager
def seeded_generator(key: Tensor) -> Iterator[None]:
    """Seed torch's generators from a key, and restore them at the end.

    Raises:
        InputError: The key is that of a stack of clients, which one generator cannot serve.
    """
    try:
        seed = int(key) >> 1
    except RuntimeError as error:  # within vmap, or while steps are captured
        raise InputError(
            "the model draws random numbers of its own in training, which works for one client"
            " after the other alone: use engine=sequential, or layers of nn.Dropout"
        ) from error
    devices = [key.device] if key.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def are_probabilities(logits: Tensor) -> bool:
    """Whether outputs are those of a softmax: not negative, with sum 1 for each example."""
    sums = logits.sum(dim=1)
    return bool((logits >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3))
