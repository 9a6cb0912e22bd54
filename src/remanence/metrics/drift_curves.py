"""Each client's accuracy on every concept over rounds, from which `drift` computes its measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import accuracy_of
from remanence.results.ledger import GLOBAL, Ledger

if TYPE_CHECKING:
    from remanence.results.run import Run


@dataclass(frozen=True)
class DriftCurves:
    """Accuracy of the model that each client uses, on every concept, over recorded rounds."""

    round: np.ndarray  # [R] ascending
    step: np.ndarray  # [R] time step of each round
    by_concept: np.ndarray  # [R, K, M]
    clusters: np.ndarray  # [T, K]
    rounds_per_step: int

    @cached_property
    def on_own_concept(self) -> np.ndarray:
        """Accuracy of each client on its own concept: [R, K]."""
        return np.take_along_axis(self.by_concept, self.clusters[self.step][:, :, None], axis=2)[
            :, :, 0
        ]

    @cached_property
    def steps(self) -> list[int]:
        """The time steps that have records."""
        return [int(step) for step in np.unique(self.step)]

    @cached_property
    def ends(self) -> np.ndarray:
        """The index of the last record of each of these time steps: [S]."""
        return np.array(
            [int(np.flatnonzero(self.step == step)[-1]) for step in self.steps], dtype=np.int64
        )


def read_curves(
    ledger: Ledger,
    clusters: Any = None,
    rounds_per_step: int | None = None,
    *,
    evaluated: str = "global",
    clients: int | None = None,
) -> DriftCurves:
    """Curves from the test records of the primary model after each round.

    Args:
        ledger: The ledger.
        clusters: The concept of each client at each time step [T, K]. Default: all clients are in
            concept 0.
        rounds_per_step: Rounds of a time step. Default: all recorded rounds.
        evaluated: The primary model: "global", or "personal" for the clients' own models.
        clients: Number of clients. Default: as many as the ledger names.
    """
    if evaluated == "personal":
        records = ledger.select(moment="personal", split="test")
    else:
        merged, refined = (
            ledger.select(moment=moment, split="test", model=GLOBAL)
            for moment in ("merged", "refined")
        )
        records = np.concatenate([merged[~np.isin(merged["round"], refined["round"])], refined])
    if not len(records):
        raise InputError(
            f"the ledger has no test records of the {evaluated} model: let the run record at"
            " least one round"
        )
    rounds, first = np.unique(records["round"], return_index=True)
    steps = records["time_step"][first].astype(np.int64)
    known = int(records["model"].max()) + 1
    table = (
        np.zeros((int(steps.max()) + 1, clients or max(known, 1)), np.int64)
        if clusters is None
        else np.asarray(clusters, np.int64)
    )
    if len(table) <= steps.max() or known > table.shape[1]:
        raise InputError(
            f"clusters has {len(table)} time steps of {table.shape[1]} clients, the ledger"
            " more: give the run's own table"
        )
    concepts = 1 + max(int(table.max()), int(records["owner"].max()))
    accuracy = np.full((len(rounds), table.shape[1], concepts), np.nan)
    accuracies = accuracy_of(records)
    for concept in range(concepts):
        here = np.isin(records["owner"], (-1, concept))  # -1: examples of all concepts
        when, model, value = (
            np.searchsorted(rounds, records["round"][here]),
            records["model"][here],
            accuracies[here],
        )
        if evaluated == "personal":
            accuracy[when, model, concept] = value
        else:
            accuracy[when, :, concept] = value[:, None]
    return DriftCurves(rounds, steps, accuracy, table, rounds_per_step or int(rounds.max()))


def drift_curves(run: Run) -> DriftCurves:
    """The curves of a run."""
    metadata = run.metadata
    return read_curves(
        run.ledger,
        metadata.get("clusters"),
        metadata.get("rounds_per_step"),
        evaluated=metadata.get("evaluated", "global"),
        clients=metadata.get("clients"),
    )
