"""The examples of every client at every time step.

`experiment/data_setup.py` makes it from `partitions.py` and `splits.py`, and with drift from
`drift_sampling.py`. A population is a pure function of the experiment. It holds example ids, not
examples: an id names an example in one view (`concept_views.py`), so an example keeps its id when
another client gets it, and the same image with a swapped label has another id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from remanence.core.errors import InputError


@dataclass(frozen=True)
class PartitionIndices:
    """The example ids of every client in two flat arrays, whatever the number of clients."""

    ids: np.ndarray  # [sum of sizes] int64
    offsets: np.ndarray  # [K + 1] int64

    def for_client(self, client: int) -> np.ndarray:
        """Return the ids of one client."""
        return self.ids[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of examples of each client. [K] int64"""
        return np.diff(self.offsets)

    def select(self, chosen: np.ndarray) -> PartitionIndices:
        """Return the ids at the positions where `chosen` [sum of sizes] is true."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        return PartitionIndices(self.ids[chosen], before[self.offsets])

    def label_counts(self, clients: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the labels of some clients, see `ClientData.label_counts`."""
        sizes = self.sizes[clients]
        position = np.repeat(np.arange(len(clients)), sizes)
        # an example's place among those of its client
        place = np.arange(len(position)) - (np.cumsum(sizes) - sizes)[position]
        cell = position * classes + labels[self.ids[self.offsets[clients][position] + place]]
        return np.bincount(cell, minlength=len(clients) * classes).reshape(len(clients), classes)

    @classmethod
    def concat(cls, parts: Sequence[np.ndarray]) -> PartitionIndices:
        """Join the ids of each client, in the order of the clients."""
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        ids = np.concatenate(parts).astype(np.int64) if len(parts) else np.empty(0, np.int64)
        return cls(ids, offsets)


@dataclass(frozen=True)
class ClientData:
    """The examples of every client at one time step.

    Args:
        train: training examples.
        valid: validation examples.
        cluster: [K] int64, the concept that the data of each client follow.
    """

    train: PartitionIndices
    valid: PartitionIndices
    cluster: np.ndarray

    def label_counts(
        self,
        clients: np.ndarray,
        labels: np.ndarray,
        classes: int,
        *,
        with_validation: bool = False,
    ) -> np.ndarray:
        """Count the training labels of some clients.

        Args:
            clients: [k] client numbers.
            labels: the label of every example id.
            classes: the number of classes.
            with_validation: count the labels of validation examples, too.

        Returns:
            [k, classes] counts.
        """
        counts = self.train.label_counts(clients, labels, classes)
        return (
            counts + self.valid.label_counts(clients, labels, classes)
            if with_validation
            else counts
        )


@dataclass(frozen=True)
class FederatedPopulation:
    """The data of all clients over time. Without drift there is one time step and one concept.

    Args:
        time_steps: the data of every client, for each time step.
        test_ids: the ids of the test examples of each concept.
    """

    time_steps: tuple[ClientData, ...]
    test_ids: tuple[np.ndarray, ...]

    def at(self, time_step: int) -> ClientData:
        """Return the data of every client at one time step."""
        return self.time_steps[time_step]

    @property
    def num_clients(self) -> int:
        return len(self.time_steps[0].train.sizes)

    @property
    def num_concepts(self) -> int:
        return len(self.test_ids)

    @property
    def max_client_size(self) -> int:
        """The largest training set of any client at any time step."""
        return max(int(step.train.sizes.max()) for step in self.time_steps)

    def merge_clients(self) -> FederatedPopulation:
        """Return a population with a single client that has all examples."""

        def merge(indices: PartitionIndices) -> PartitionIndices:
            ends = np.array([0, len(indices.ids)], dtype=np.int64)
            return PartitionIndices(np.sort(indices.ids), ends)

        if self.num_concepts > 1:
            raise InputError(
                "the data of all clients cannot be pooled in one place while clients differ in"
                " their concepts: leave drift out"
            )
        cluster = np.zeros(1, dtype=np.int64)
        steps = (ClientData(merge(s.train), merge(s.valid), cluster) for s in self.time_steps)
        return replace(self, time_steps=tuple(steps))
