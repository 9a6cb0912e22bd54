"""What passes between the round loop and an engine, and the protocol that every engine keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ClientStats, ModelState, Reply


class ClientWork(NamedTuple):
    """One round's work for an engine: k clients, and all they need besides their data."""

    round: int
    time_step: int
    clients: np.ndarray  # [k] int64, ascending
    start: ModelState  # one model for all, or stacked [k, ...] where clients differ
    per_client_start: bool  # is `start` stacked?
    broadcast: Tree  # by part
    client_state: Tree  # by part, stacked [k, ...]
    stats: ClientStats  # stacked [k, ...]
    optimizer_hparams: dict[str, float]
    key: Key  # of the round
    num_phases: int = 0  # only the first so many of the task's phases; 0: all


class ConfusionCounts(NamedTuple):
    """How m models do on g groups of rows: everything else follows from these counts."""

    confusion: Tensor  # [m, g, C, C] int64: rows are true classes, columns predicted ones
    loss: Tensor  # [m, g] float64: summed cross-entropy


class ExampleResults(NamedTuple):
    """How models do on single examples, pair after pair."""

    pair: np.ndarray  # [n] int64
    ids: np.ndarray  # [n] int64
    correct: np.ndarray  # [n] bool
    margin: np.ndarray  # [n] float32: logit of the true class minus the largest other


class PairCounts(NamedTuple):
    """How n models do, each on rows of its own."""

    confusion: Tensor  # [n, C, C] int64
    loss: Tensor  # [n] float64: summed cross-entropy
    examples: ExampleResults | None = None  # where asked for

    def mean_loss(self) -> Tensor:
        """[n] float64; NaN where a pair has no rows"""
        return self.loss / self.confusion.sum(dim=(1, 2))


class Engine(Protocol):
    """A transport: carries work to where the data are. Never knows which method it runs."""

    name: str
    # how it takes local steps: plainly ("eager", "auto"), written down ("captured") or "compiled"; the
    # server's are compiled where these are
    execution: str

    def train(self, job: ClientWork) -> Iterator[Reply]:
        """Local training; replies come in chunks, each of one client or more."""
        ...

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        """Models (stacked [m, ...]) on a split: all its rows as one group, or one group for each of
        the owners' rows.

        The test split always has one group for every concept of the experiment.
        """
        ...

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        """Model which[i] of a stack on the rows of owners[i]: a client, or on the test split a
        concept.
        """
        ...

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        """What models (stacked [m, ...]) say of these training rows, which are the server's to
        see: of its public set. ids: [n] -> logits [m, n, C]
        """
        ...

    def close(self) -> None: ...
