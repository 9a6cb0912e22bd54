"""Ledgers small enough to work out by hand: records from how many of each class were right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from remanence.results.ledger import (
    ALL,
    EXAMPLE,
    GLOBAL,
    MOMENTS,
    PEER_COUNTS,
    SIMILARITY,
    SPLITS,
    Ledger,
    confusion_type,
    peers_type,
    record_type,
)

Counts = Sequence[int]  # [C]


def evaluated(
    right: Counts, total: Counts, moment: str, model: int = GLOBAL, **columns: Any
) -> np.ndarray:
    """One record: `right` of `total` examples of each class; round 1, time step 0, the test
    split and examples of all clients by default.
    """
    record = np.zeros(1, dtype=record_type(len(total)))
    record["correct"], record["total"], record["predicted"] = right, total, right
    words = {"moment": MOMENTS.index(moment), "split": SPLITS.index(columns.pop("split", "test"))}
    for name, value in {"round": 1, "owner": ALL, "model": model, **columns, **words}.items():
        record[name] = value
    return record


def play_round(
    total: Counts,
    before: Counts,
    local: Mapping[int, tuple[float, Counts]],
    merged: Counts,
    *,
    refined: Counts | None = None,
    before_drift: Counts | None = None,
    **columns: Any,
) -> list[np.ndarray]:
    """The test records of a round with a server: right answers at each moment; clients with
    their aggregation weights.
    """
    records = (
        [] if before_drift is None else [evaluated(before_drift, total, "before_drift", **columns)]
    )
    records.append(evaluated(before, total, "before", **columns))
    records += [
        evaluated(right, total, "local", client, weight=weight, **columns)
        for client, (weight, right) in local.items()
    ]
    records.append(evaluated(merged, total, "merged", **columns))
    return (
        records if refined is None else [*records, evaluated(refined, total, "refined", **columns)]
    )


def mix_and_train(
    total: Counts, clients: Mapping[int, tuple[Counts, Counts, Counts]], **columns: Any
) -> list[np.ndarray]:
    """The test records of a round without a server: for each client right answers before, after
    mixing and after training.
    """
    moments = ("before", "merged", "local")
    return [
        evaluated(right, total, moment, client, **columns)
        for client, rights in clients.items()
        for moment, right in zip(moments, rights, strict=True)
    ]


def make_ledger(*records: np.ndarray, classes: int = 1) -> Ledger:
    """`classes` matters only where there are no records."""
    joined = np.concatenate(records) if records else np.zeros(0, dtype=record_type(classes))
    return Ledger(joined, [f"class {number}" for number in range(joined["correct"].shape[1])])


def shuffle(ledger: Ledger, order: Sequence[int]) -> Ledger:
    """The same records in another order."""
    return Ledger(ledger.records[np.asarray(order, dtype=np.int64)], ledger.class_names)


def make_examples(*rows: tuple[int, str, int, int, bool, float]) -> np.ndarray:
    """Records of single examples: round, moment, client, id, right, margin."""
    return np.array(
        [
            (round, 0, MOMENTS.index(moment), client, id, right, margin)
            for round, moment, client, id, right, margin in rows
        ],
        dtype=EXAMPLE,
    )


def make_confusions(
    *rows: tuple[int, Sequence[Counts]], moment: str = "merged", model: int = GLOBAL
) -> np.ndarray:
    """Confusion matrices of a model on the test set, by round."""
    records = np.zeros(len(rows), dtype=confusion_type(len(rows[0][1]) if rows else 1))
    records["moment"], records["split"], records["model"], records["owner"] = (
        MOMENTS.index(moment),
        SPLITS.index("test"),
        model,
        ALL,
    )
    for place, (round, confusion) in enumerate(rows):
        records[place]["round"], records[place]["confusion"] = round, confusion
    return records


def make_peers(
    *rows: tuple[int, int, Sequence[Sequence[float]]], kind: str = "peer_counts"
) -> np.ndarray:
    """Tables over pairs of clients: round, time step, values."""
    number = {"peer_counts": PEER_COUNTS, "similarity": SIMILARITY}[kind]
    return np.array(
        [(round, step, number, values) for round, step, values in rows],
        dtype=peers_type(len(rows[0][2])),
    )


def make_run(
    metrics: Sequence[dict[str, Any]] = (), ledger: Ledger | None = None, **about: Any
) -> Any:
    """What measures read of a run."""
    return SimpleNamespace(metrics=list(metrics), metadata=about, ledger=ledger)


def line(
    round: int,
    accuracy: float | None = None,
    per_class: Sequence[float | None] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A line of metrics.jsonl, of the global model on the test set by default."""
    return {
        "round": round,
        "time_step": 0,
        "model": "global",
        "split": "test",
        "accuracy": accuracy,
        "per_class": per_class,
        **fields,
    }
