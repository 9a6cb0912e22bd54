"""Values that all layers exchange: batches, models, replies, and what is known of a task.

Shapes: B examples in a batch, C classes, K clients in the experiment, k clients in a cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Params, Tree
from remanence.core.remote_params import RemoteParams


class Batch(NamedTuple):
    """Rows of a client's data. Padding repeats a real row and has weight 0, so that no gradient
    is ever NaN.
    """

    x: Tensor  # [B, ...]
    y: Tensor  # [B] int64, or [B, C] soft targets
    weight: Tensor  # [B]
    ids: Tensor  # [B] int64: the same number for the same example, whatever drifts


class Output(NamedTuple):
    """What a model says about a batch."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, d]: the input of the head


class ModelState(NamedTuple):
    """A model as two flat trees: where a client starts, and where it ends."""

    params: Params
    buffers: Params

    @property
    def num_models(self) -> int:
        """How many models there are in a stack of them."""
        return len(next(iter(self.params.values())))

    def select(self, index: int | slice | Tensor) -> ModelState:
        """Of a stack of models, one (an integer) or some."""
        return ModelState(pytree.take(self.params, index), pytree.take(self.buffers, index))

    def scatter(self, index: Tensor, models: ModelState) -> ModelState:
        """The stack with other models in these places, [k] int64 for a stack of k."""

        def place(old: Params, new: Params) -> Params:
            return {name: value.index_copy(0, index, new[name]) for name, value in old.items()}

        return ModelState(place(self.params, models.params), place(self.buffers, models.buffers))

    @staticmethod
    def stack(models: Sequence[ModelState]) -> ModelState:
        """Models one on top of the other."""
        return ModelState(
            pytree.stack([model.params for model in models]),
            pytree.stack([model.buffers for model in models]),
        )


class ClientStats(NamedTuple):
    """What is known of a client's data in this round; recomputed each round, because data drift."""

    size: Tensor  # number of training rows
    label_counts: Tensor  # [C] of the training rows


@dataclass(frozen=True)
class TaskInfo:
    """What a method may know of the experiment. Nothing in it changes during a run."""

    num_clients: int
    num_classes: int
    max_client_size: (
        int  # the most training rows any client ever has: the size of per-example state
    )
    num_examples: int  # training rows that exist in all: ids are below it
    dtype: torch.dtype
    device: torch.device
    head: tuple[str, ...]  # parameter names of the classifier
    layers: tuple[tuple[str, ...], ...]  # parameter names of each layer, counted from the output
    norms: tuple[str, ...]  # parameter names of normalization layers
    buffers: tuple[str, ...]  # buffer names: their statistics
    public_size: int  # rows in the server's public set
    communicated: tuple[str, ...] = ()  # parameter names that travel: trained and not personal
    # clients expected in a round, where each joins by a coin of its own; 0: their number is fixed
    expected_cohort: float = 0.0
    batch_size: int = 0  # the most rows of a batch
    example_shape: tuple[int, ...] = ()  # the shape of one row as a network gets it,
    example_dtype: torch.dtype = torch.float32  # and of which numbers


class Reply(NamedTuple):
    """What k clients send back, as one stack: every tensor has the clients as leading axis."""

    client: Tensor  # [k] int64
    round: Tensor  # [k] int64
    params: Params | RemoteParams  # the trained parameters; frozen and personal ones are absent
    buffers: Params
    payload: Tree  # by part: what else travels up
    weight: Tensor  # [k] float64: number of training rows
    client_state: Tree  # by part: what the client keeps; never travels
    loss: Tensor  # [k]: mean training loss, for the log

    @property
    def num_clients(self) -> int:
        """How many clients there are in the stack."""
        return int(self.client.shape[0])

    def delta(self, start: ModelState) -> Params:
        """How far each client moved. -> [k, ...] over the names that were trained"""
        return pytree.sub(self.params, start.params)

    def select(self, index: Tensor | slice) -> Reply:
        """Some of the clients, in the order of the index."""
        picked: Any = (
            part.select(index)
            if isinstance(part, RemoteParams)
            else pytree.take(part, index)
            if isinstance(part, dict)
            else part[index]
            for part in self
        )
        return Reply(*picked)

    @staticmethod
    def concat(chunks: Sequence[Reply]) -> Reply:
        """Stacks one behind the other."""
        joined: Any = (
            torch.cat(parts) if isinstance(parts[0], Tensor) else _join_trees(parts)
            for parts in zip(*chunks, strict=True)
        )
        return Reply(*joined)


def _join_trees(parts: Sequence[Any]) -> Any:
    together = RemoteParams.concat(parts)
    return pytree.concatenate(parts) if together is None else together
