"""What passes between the round loop and an engine, and the protocol of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from remanence.core import pytree
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.types import ClientStats, ModelState, Reply

Result = TypeVar("Result")


class ClientWork(NamedTuple):
    """The work of one round for k clients: all that they need besides their data."""

    round: int
    time_step: int
    clients: np.ndarray  # [k] int64, ascending
    start: ModelState  # one model for all, or stacked [k, ...] where each client has its own
    per_client_start: bool  # is `start` stacked?
    broadcast: Tree  # by part
    client_state: Tree  # by part, stacked [k, ...]
    stats: ClientStats  # stacked [k, ...]
    optimizer_hparams: dict[str, float]
    key: Key  # of the round
    num_phases: int = 0  # train only the first phases of the task; 0: all of them

    def select(self, index: Tensor | slice) -> ClientWork:
        """The work of some of the clients, in the order of the index, a slice or a CPU tensor."""
        return self._replace(
            clients=self.clients[index if isinstance(index, slice) else index.numpy()],
            start=self.start.select(index) if self.per_client_start else self.start,
            client_state=pytree.take(self.client_state, index),
            stats=ClientStats(*(value[index] for value in self.stats)),
        )

    def without_model(self) -> ClientWork:
        """The same work with `start` and `broadcast` empty, where these are sent separately."""
        return self._replace(start=ModelState({}, {}), broadcast={})


class ConfusionCounts(NamedTuple):
    """Counts of m models on g groups of examples; every measure follows from them."""

    confusion: Tensor  # [m, g, C, C] int64: true classes by predicted ones
    loss: Tensor  # [m, g] float64: summed cross-entropy


class ExampleResults(NamedTuple):
    """Results on single examples, ordered by pair and example."""

    pair: np.ndarray  # [n] int64
    ids: np.ndarray  # [n] int64
    correct: np.ndarray  # [n] bool
    margin: np.ndarray  # [n] float32: logit of the true class minus the largest other


class PairCounts(NamedTuple):
    """Counts of n pairs of a model and the examples of one owner."""

    confusion: Tensor  # [n, C, C] int64
    loss: Tensor  # [n] float64: summed cross-entropy
    examples: ExampleResults | None = None  # where requested

    def mean_loss(self) -> Tensor:
        """[n] float64; NaN where a pair has no examples"""
        return self.loss / self.confusion.sum(dim=(1, 2))


class Rejection(NamedTuple):
    """A client whose reply does not count, and why."""

    client: int
    code: str
    reason: str


class Engine(Protocol):
    """Trains and evaluates clients where their data are. It does not know which method it runs.

    `engines.base.BaseEngine` holds the defaults of what most engines share. All engines use these
    parameter names.
    """

    name: str
    # How local steps run: "eager", "auto" (not decided yet, eager), "captured" or "compiled". The
    # server's own steps are compiled where these are.
    execution: str

    @property
    def degraded_reason(self) -> str:
        """Why the engine is slower than requested; empty: it is not. Reasons are only added."""
        ...

    def train(self, work: ClientWork) -> Iterator[Reply]:
        """Train the clients locally.

        Args:
            work: The clients of a round and what they start from.

        Returns:
            Replies in chunks of one client or more, in any order. A client that drops out has none.
        """
        ...

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        """Evaluate every model on every group of examples of a split.

        Args:
            models: Stacked [m, ...].
            split: "train", "valid", "public" or "test".
            owners: Clients; each one's examples are a group. None: the whole split is one group.
                The test split always has one group for each concept.
            time_step: The time step whose examples are used; with drift they change.
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
        """Evaluate model which[i] of a stack on the examples of owners[i].

        Args:
            models: Stacked [m, ...].
            which: [n] indices into `models`.
            owners: [n] clients or, on the test split, concepts.
            split: As for `score`.
            time_step: As for `score`.
            examples: Also return the results on single examples.
        """
        ...

    def score_personal(self, work: ClientWork) -> PairCounts:
        """Evaluate personal models where they are made: for engines whose clients are remote.

        Args:
            work: The clients, and what their personal models are made from.

        Returns:
            A pair for each client: its personal model on its own validation examples.
        """
        ...

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        """Logits of models on training examples that the server may read: its public set.

        Args:
            models: Stacked [m, ...].
            ids: [n] examples.

        Returns:
            [m, n, C]
        """
        ...

    def pop_declined(self) -> list[Rejection]:
        """Clients of the last round that will not reply, and why; a second call returns none."""
        ...

    def run_exclusive(self, function: Callable[[Engine], Result]) -> Result:
        """Run work of the server that uses an engine and may compile or capture.

        Runs that share an engine must not do so at the same time.

        Args:
            function: Is called once, with the engine to use.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds; it is not used again."""
        ...
