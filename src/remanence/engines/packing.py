"""Trees of tensors as trees of arrays, which are faster to send to another process.

A pipe sends a tensor as a handle of shared memory and an array as plain bytes. An object store maps
arrays into a process without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class PackedTensor:
    """An array that was a tensor, as opposed to one that was an array before."""

    def __init__(self, array: np.ndarray):
        self.array = array


def pack(value: Any) -> Any:
    """Tensors as arrays on the host, in dictionaries and (named) tuples of any depth."""
    if isinstance(value, Tensor):
        return PackedTensor(value.detach().cpu().contiguous().numpy())
    return map_items(pack, value)


def unpack(value: Any) -> Any:
    """The inverse of `pack`: tensors on the CPU, which share memory with the arrays."""
    if isinstance(value, PackedTensor):
        return torch.from_numpy(value.array)
    return map_items(unpack, value)


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a dictionary or a (named) tuple; others stay as they are."""
    if isinstance(value, dict):
        return {name: function(item) for name, item in value.items()}
    if isinstance(value, tuple):
        items = (function(item) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
