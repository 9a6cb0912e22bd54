"""Trees of tensors as the arrays of a message, and back."""

from __future__ import annotations

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.pytree import Tree
from remanence.flower.wire import WireArrays


def as_arrays(tree: Tree) -> WireArrays:
    """The leaves of a tree as numpy arrays by path.

    >>> sorted(as_arrays({"start": {"params": {"w": torch.zeros(2)}, "buffers": {}}}))
    ['start/params/w']
    """
    return {path: x.detach().cpu().contiguous().numpy() for path, x in pytree.flatten(tree).items()}


def as_tree(arrays: WireArrays, root: str, device: torch.device) -> Tree:
    """The tree below one root.

    Args:
        arrays: Arrays by path, as received (read-only).
        root: The first part of the paths to take.
        device: Where the tensors are copied to.
    """
    prefix = f"{root}{pytree.SEPARATOR}"
    below = {
        path.removeprefix(prefix): array
        for path, array in arrays.items()
        if path.startswith(prefix)
    }
    for path in below:
        parts = path.split(pytree.SEPARATOR)
        if any(pytree.SEPARATOR.join(parts[:depth]) in below for depth in range(1, len(parts))):
            raise ValueError(
                f"the names below {root} are not those of a tree: {path} is below a leaf"
            )
    return pytree.unflatten(
        {path: torch.from_numpy(np.array(array)).to(device) for path, array in below.items()}
    )
