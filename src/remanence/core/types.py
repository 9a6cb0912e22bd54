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
    """Examples of one client. Padding repeats a real example and has weight 0, so that no gradient
    is ever NaN.
    """

    x: Tensor  # [B, ...]
    y: Tensor  # [B] int64, or [B, C] soft targets
    weight: Tensor  # [B]
    ids: Tensor  # [B] int64: an example keeps its id while clients' data drift


class Output(NamedTuple):
    """The output of a model for a batch."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, d]: the input of the head


class ModelState(NamedTuple):
    """The parameters and buffers of one model, or of a stack of models with a leading axis."""

    params: Params
    buffers: Params

    @property
    def num_models(self) -> int:
        """The number of models in a stack."""
        return len(next(iter(self.params.values())))

    def select(self, index: int | slice | Tensor) -> ModelState:
        """One model of a stack (an integer) or a smaller stack."""
        return ModelState(pytree.take(self.params, index), pytree.take(self.buffers, index))

    def scatter(self, index: Tensor, models: ModelState) -> ModelState:
        """The stack with the models at `index` [k] int64 replaced by a stack of k models."""

        def place(old: Params, new: Params) -> Params:
            return {name: value.index_copy(0, index, new[name]) for name, value in old.items()}

        return ModelState(place(self.params, models.params), place(self.buffers, models.buffers))

    @staticmethod
    def stack(models: Sequence[ModelState]) -> ModelState:
        """Stack single models along a new leading axis."""
        return ModelState(
            pytree.stack([model.params for model in models]),
            pytree.stack([model.buffers for model in models]),
        )


class ClientStats(NamedTuple):
    """What is known of a client's data in this round; recomputed each round, because data drift."""

    size: Tensor  # number of training examples
    label_counts: Tensor  # [C] of the training examples


@dataclass(frozen=True)
class TaskInfo:
    """What a method may know of the experiment. Nothing in it changes during a run."""

    num_clients: int
    num_classes: int
    # the most training examples that any client ever has: the size of per-example state
    max_client_size: int
    num_examples: int  # training examples of all clients: ids are below it
    dtype: torch.dtype
    device: torch.device
    head: tuple[str, ...]  # parameter names of the classifier
    layers: tuple[tuple[str, ...], ...]  # parameter names of each layer, counted from the output
    norms: tuple[str, ...]  # parameter names of normalization layers
    buffers: tuple[str, ...]  # buffer names: their statistics
    public_size: int  # examples in the server's public set
    # names of the parameters that clients send: trained and not personal
    communicated: tuple[str, ...] = ()
    # expected number of clients in a round under Poisson sampling; 0: the number is fixed
    expected_cohort: float = 0.0
    batch_size: int = 0  # the most examples in a batch
    example_shape: tuple[int, ...] = ()  # shape of one example as the network gets it
    example_dtype: torch.dtype = torch.float32


class Reply(NamedTuple):
    """The replies of k clients as one stack: every tensor has the clients as leading axis."""

    client: Tensor  # [k] int64
    round: Tensor  # [k] int64
    params: Params | RemoteParams  # the trained parameters; frozen and personal ones are absent
    buffers: Params
    payload: Tree  # by part: what else clients send
    weight: Tensor  # [k] float64: number of training examples
    client_state: Tree  # by part: what the client keeps; never sent
    loss: Tensor  # [k]: mean training loss of the last phase, for the log

    @property
    def num_clients(self) -> int:
        """The number of clients in the stack."""
        return int(self.client.shape[0])

    def delta(self, start: ModelState) -> Params:
        """The update of each client, its parameters minus those of `start`. -> [k, ...]"""
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
        """Join stacks along their leading axis."""
        joined: Any = (
            torch.cat(parts) if isinstance(parts[0], Tensor) else _join_trees(parts)
            for parts in zip(*chunks, strict=True)
        )
        return Reply(*joined)


def _join_trees(parts: Sequence[Any]) -> Any:
    joined = RemoteParams.concat(parts)
    return pytree.concatenate(parts) if joined is None else joined
