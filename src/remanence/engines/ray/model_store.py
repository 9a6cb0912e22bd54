"""Stacks of models in the object store: put there once, for all workers.

Where every client has a model of its own, the same models are tried by peers, trained and evaluated
in one round. They are stored in blocks, so that a node reads only what its clients need, and its
workers share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.types import ModelState
from remanence.engines.packing import pack
from remanence.engines.ray.serialization import unpack

# Approximate bytes of a block: small blocks need many calls, large ones contain models that a
# worker does not need.
BLOCK = 1 << 20
MAX_STACKS = 3  # of a round without a server: the models before, averaged and trained


class ModelRefs(NamedTuple):
    """Some models of a stack, as references for a worker."""

    blocks: list[Any]  # references to stacks of models, one behind the other
    place: np.ndarray  # [n] int64: which models of all these

    def open(self, device: torch.device) -> ModelState:
        """The models as a stack; of the blocks only these models are copied."""
        import ray

        offset, parts, order = 0, [], []
        for block in ray.get(self.blocks):
            count = len(next(iter(block[0].values())).array)
            mine = np.flatnonzero((self.place >= offset) & (self.place < offset + count))
            rows = self.place[mine] - offset
            picked: Any = tuple(
                {name: type(item)(item.array[rows]) for name, item in tree.items()}
                for tree in block
            )
            parts.append(unpack(picked, device))
            order.append(mine)
            offset += count
        back = torch.from_numpy(np.argsort(np.concatenate(order), kind="stable")).to(device)
        params, buffers = (
            pytree.take(pytree.concatenate([part[kind] for part in parts]), back) for kind in (0, 1)
        )
        return ModelState(params, buffers)


class ModelStore:
    """The stacks that were last put into the store.

    A stack is recognized as the same object, since trees never change.

    Args:
        put: Puts a value into the store and returns a reference.
    """

    def __init__(self, put: Callable[[Any], Any]):
        self.put = put
        # the stack, its blocks, models in a block
        self.stacks: list[tuple[ModelState, list[Any], int]] = []

    def pick(self, models: ModelState, index: np.ndarray) -> ModelRefs:
        """Some models of a stack, for a worker: the blocks that hold them. index: [n]"""
        blocks, size = self._place(models)
        used, local = np.unique(index // size, return_inverse=True)
        return ModelRefs([blocks[number] for number in used], local * size + index % size)

    def _place(self, models: ModelState) -> tuple[list[Any], int]:
        for stack, blocks, size in self.stacks:
            if stack.params is models.params and stack.buffers is models.buffers:
                return blocks, size
        count = models.num_models
        one = (pytree.nbytes(models.params) + pytree.nbytes(models.buffers)) // max(count, 1)
        size = max(1, BLOCK // max(one, 1))
        blocks = [
            self.put(pack(tuple(models.select(slice(first, first + size)))))
            for first in range(0, count, size)
        ]
        self.stacks = [*self.stacks[-MAX_STACKS + 1 :], (models, blocks, size)]
        return blocks, size
