"""What stays the same for a whole run: model, method, optimizer, phases and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remanence.core.compose import ComposedMethod
from remanence.core.model import Model
from remanence.core.pytree import Tree
from remanence.core.slots import Optimizer, Phase
from remanence.core.types import ModelState, TaskInfo
from remanence.data.batches import Examples
from remanence.data.population import FederatedPopulation

PERSONAL = "personal"  # key in a client's state: its personal parameters and buffers


class EngineCache(dict[str, Any]):
    """What engines cache for a task between rounds. Pickling empties it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineCache, ()


@dataclass(frozen=True)
class TrainingTask:
    """What an engine needs once, at the start of a run.

    Args:
        model: The network as pure functions, with its initial parameters.
        method: The composed method.
        optimizer: The clients' local optimizer.
        info: Sizes, device and parameter names that a method may read.
        phases: The stretches of local training, in order.
        batch_size: Examples in a local batch.
        drop_last: Whether a last, smaller batch of an epoch is dropped.
        train: Training examples of all clients.
        test: Test examples.
        public: Ids of the training examples that the server holds.
        population: Which examples each client holds at each time step.
        average_buffers: Whether buffers travel and are averaged at the server.
        clients_remote: Whether clients keep their states and statistics on their own machines.
            The coordinator then knows only the round of a client's state.
        engine_cache: What engines cache between rounds.
    """

    model: Model
    method: ComposedMethod
    optimizer: Optimizer
    info: TaskInfo
    phases: tuple[Phase, ...]
    batch_size: int
    drop_last: bool
    train: Examples
    test: Examples
    public: Tensor
    population: FederatedPopulation
    average_buffers: bool
    clients_remote: bool = False
    engine_cache: EngineCache = field(default_factory=EngineCache, compare=False, repr=False)

    def trained_params(self, phase: Phase) -> tuple[str, ...]:
        """Names of the parameters that a phase trains. Frozen parameters are never among them."""
        frozen = {*self.method.frozen(self.info), *self.model.fixed}
        names = [name for name in self.model.initial.params if name not in frozen]
        wanted = set(names if phase.trainable is None else phase.trainable(self.info, names))
        return tuple(name for name in names if name in wanted)

    def communicated_params(self) -> tuple[str, ...]:
        """Names of the parameters that travel: all that are trained and not personal."""
        personal = self.method.personal(self.info)
        trained = {name for phase in self.phases for name in self.trained_params(phase)}
        return tuple(
            name for name in self.model.initial.params if name in trained and name not in personal
        )

    def communicated_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that travel."""
        personal = self.method.personal(self.info)
        return tuple(
            name
            for name in self.model.initial.buffers
            if self.average_buffers and name not in personal
        )

    def personal_state(self, model: ModelState) -> Tree:
        """The part of a model that stays with its client; an empty tree if there is none."""
        names = self.method.personal(self.info)
        params = {name: value for name, value in model.params.items() if name in names}
        buffers = {name: value for name, value in model.buffers.items() if name in names}
        return {kind: part for kind, part in (("params", params), ("buffers", buffers)) if part}

    @property
    def is_stateful(self) -> bool:
        """Whether clients keep a state between rounds."""
        return self.method.is_stateful or bool(self.method.personal(self.info))

    def payload_spec(self) -> Tree:
        """Names, shapes and dtypes of what one client sends besides the model, by part."""
        initial = self.model.initial
        return {
            part.name: part.payload(initial, self.info)
            for part in self.method.parts
            if part.payload is not None
        }

    def hparam_tensors(self) -> Any:
        """All hyper-parameters of the method, by part. A hook's context holds its own part's."""
        return {part: self.tensors(hparams) for part, hparams in self.method.hyper.items()}

    def tensors(self, numbers: dict[str, float]) -> dict[str, Tensor]:
        """Numbers as scalar tensors in the parameters' precision.

        They are filled on the device: the host would have to wait for a copy.
        """
        return {
            name: torch.full((), value, dtype=self.info.dtype, device=self.info.device)
            for name, value in numbers.items()
        }


class ClientIndices(NamedTuple):
    """The ids of a client's examples. A weight of 0 marks padding."""

    train: Tensor  # [n] ids
    train_weight: Tensor  # [n]
    valid: Tensor  # [v] ids
    valid_weight: Tensor  # [v]
