"""Who holds which rows, and when.

A population is a pure function of (experiment, time step): it gives each client's training and
validation rows by their ids. An id names a row as a concept sees it (`concept_views.py`), so an example
keeps its identity when it changes hands, and a row with swapped labels is another example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.partitions import split_validation


@dataclass(frozen=True)
class PartitionIndices:
    """Row numbers of many clients in two arrays: as small as it gets, whatever the number of
    clients.
    """

    ids: np.ndarray  # [sum of sizes] int64
    offsets: np.ndarray  # [K + 1] int64

    def for_client(self, client: int) -> np.ndarray:
        return self.ids[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    @classmethod
    def concat(cls, parts: Sequence[np.ndarray]) -> PartitionIndices:
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(
            np.concatenate(parts).astype(np.int64) if len(parts) else np.empty(0, np.int64), offsets
        )


@dataclass(frozen=True)
class ClientData:
    """What every client holds at one time step."""

    train: PartitionIndices
    valid: PartitionIndices
    cluster: np.ndarray  # [K] int64: the concept that each client's data follow

    def label_counts(self, clients: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
        """Training labels of some clients. labels: of every example, by id -> [k, classes]"""
        sizes = self.train.sizes[clients]
        ids = np.concatenate(
            [np.empty(0, np.int64), *(self.train.for_client(int(client)) for client in clients)]
        )
        cell = np.repeat(np.arange(len(clients)), sizes) * classes + labels[ids]
        return np.bincount(cell, minlength=len(clients) * classes).reshape(len(clients), classes)


@dataclass(frozen=True)
class FederatedPopulation:
    """The clients of an experiment over time. Without drift there is one time step, and one
    concept.
    """

    time_steps: tuple[ClientData, ...]
    test_ids: tuple[np.ndarray, ...]  # ids of the test rows of every concept

    def at(self, time_step: int) -> ClientData:
        return self.time_steps[time_step]

    @property
    def num_clients(self) -> int:
        return len(self.time_steps[0].train.sizes)

    @property
    def num_concepts(self) -> int:
        return len(self.test_ids)

    def merge_clients(self) -> FederatedPopulation:
        """The same rows in the hands of a single client."""

        def whole(rows: PartitionIndices) -> PartitionIndices:
            return PartitionIndices(np.sort(rows.ids), np.array([0, len(rows.ids)], dtype=np.int64))

        if self.num_concepts > 1:
            raise InputError(
                "centralized pools all data in one place, which has no meaning while"
                " clients differ in their concepts: leave drift out"
            )
        nobody_differs = np.zeros(1, dtype=np.int64)
        return replace(
            self,
            time_steps=tuple(
                ClientData(whole(holdings.train), whole(holdings.valid), nobody_differs)
                for holdings in self.time_steps
            ),
        )

    @property
    def max_client_size(self) -> int:
        return max(int(holdings.train.sizes.max()) for holdings in self.time_steps)


def split_train_valid(
    parts: Sequence[np.ndarray], labels: np.ndarray, validation: float, key: Key
) -> ClientData:
    """Split each client's rows into training and validation."""
    empty = [client for client, rows in enumerate(parts) if len(rows) == 0]
    if empty:
        raise InputError(
            f"client {empty[0]} has no data ({len(empty)} of {len(parts)} clients): use fewer"
            " clients or a milder partition"
        )
    pairs = [
        split_validation(rows, labels, validation, key.fold_in("validation", client))
        for client, rows in enumerate(parts)
    ]
    alike = np.zeros(len(parts), dtype=np.int64)
    return ClientData(
        PartitionIndices.concat([train for train, _ in pairs]),
        PartitionIndices.concat([valid for _, valid in pairs]),
        alike,
    )
