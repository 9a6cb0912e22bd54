"""Accuracies from the counts of a ledger. A class without examples has accuracy NaN, which causes
no warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.results.ledger import GLOBAL, Ledger


@dataclass(frozen=True)
class ModelAccuracies:
    """Accuracies by class, one row for each round and model."""

    round: np.ndarray  # [n]
    time_step: np.ndarray  # [n]
    model: np.ndarray  # [n] the client of a local model, or GLOBAL
    weight: np.ndarray  # [n] aggregation weight
    per_class: np.ndarray  # [n, C]


@dataclass(frozen=True)
class LocalModels:
    """Accuracies of the models after local training, and of the models they started from."""

    round: np.ndarray  # [n]
    client: np.ndarray  # [n]
    weight: np.ndarray  # [n]
    start: np.ndarray  # [n, C]
    end: np.ndarray  # [n, C]


def nan_mean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """The mean of the values that are not NaN; NaN, without a warning, if there are none.

    >>> nan_mean(np.array([[0.5, np.nan], [1.0, np.nan]]), axis=0)
    array([0.75,  nan])
    """
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, and NaN where the whole is 0."""
    return np.asarray(np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan))


def accuracy_of(records: np.ndarray) -> np.ndarray:
    """Accuracy over all classes of each record: [n]."""
    return divide(records["correct"].sum(axis=-1), records["total"].sum(axis=-1))


def concept_shares(clusters: Any) -> np.ndarray:
    """The share of the clients in each concept at each time step.

    Args:
        clusters: The cluster of each client at each time step [T, K], as in
            `run.metadata["clusters"]`.

    Returns:
        Shares [T, M].

    >>> concept_shares([[0, 0, 0, 1], [0, 1, 1, 1]])
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    table = np.asarray(clusters, dtype=np.int64)
    return np.stack([np.bincount(row, minlength=int(table.max()) + 1) / len(row) for row in table])


def accuracies_by_model(records: np.ndarray, shares: np.ndarray | None = None) -> ModelAccuracies:
    """Accuracy by class of each model in each round. Records of one model on several concepts are
    merged.

    Args:
        records: Records of a ledger.
        shares: The share of the clients in each concept [T, M]. An example of concept m has the
            weight share_m / (examples of m), so that the accuracy over all classes is
            sum_m share_m acc_m: the mean over clients, each on its own concept. Default: all
            examples have the same weight.
    """
    keys, first, group = np.unique(
        np.stack([records["round"], records["model"]]),
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    count, classes = keys.shape[1], records["correct"].shape[1]
    weights = np.ones(len(records)) if shares is None else _example_weights(records, shares)
    correct, total = np.zeros((count, classes)), np.zeros((count, classes))
    np.add.at(correct, group.reshape(-1), records["correct"] * weights[:, None])
    np.add.at(total, group.reshape(-1), records["total"] * weights[:, None])
    return ModelAccuracies(
        keys[0],
        records["time_step"][first],
        keys[1],
        records["weight"][first],
        divide(correct, total),
    )


def select_whole(ledger: Ledger, moment: str, split: str, shares: np.ndarray | None) -> np.ndarray:
    """The records that together evaluate a model completely: on every concept of the test set, or
    on the examples of each evaluated client.
    """
    records = ledger.select(moment=moment, split=split)
    if split != "test":
        return np.asarray(records[records["owner"] >= 0])
    if shares is None and len(
        set(zip(records["round"].tolist(), records["model"].tolist(), strict=True))
    ) < len(records):
        raise InputError(
            "the ledger has several concepts: pass the share of the clients in each as"
            ' shares=concept_shares(run.metadata["clusters"])'
        )
    return records


def local_models(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> LocalModels:
    """Accuracies of every recorded local model and of its start: the global model that the client
    received or, without a server, the client's own model after mixing.

    On validation examples (`split="valid"`) both are evaluated on the examples of the round's
    recorded participants together. Rounds with several global models are left out, since the ledger
    does not record which of them a client received.
    """
    ends = select_whole(ledger, "local", split, shares)
    starts = select_whole(ledger, "merged" if is_decentralized(ledger) else "before", split, shares)
    if split != "test":  # the same examples on both sides
        ends, starts = ends[on_examples_of(ends, starts)], starts[on_examples_of(starts, ends)]
    starts = starts[~np.isin(starts["round"], starts["round"][starts["model"] < GLOBAL])]
    end, start = accuracies_by_model(ends, shares), accuracies_by_model(starts, shares)
    places = {
        (int(round), int(model)): place
        for place, (round, model) in enumerate(zip(start.round, start.model, strict=True))
    }
    found = np.array(
        [
            places.get((int(round), int(client)), places.get((int(round), GLOBAL), -1))
            for round, client in zip(end.round, end.model, strict=True)
        ],
        dtype=np.int64,
    )
    keep = found >= 0
    return LocalModels(
        end.round[keep],
        end.model[keep],
        end.weight[keep],
        start.per_class[found[keep]],
        end.per_class[keep],
    )


def is_decentralized(ledger: Ledger) -> bool:
    """Whether clients mix their own models with those of peers, without a server."""
    return bool((ledger.select(moment="merged")["model"] >= 0).any())


def _example_weights(records: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The weight of an example of each record, share_m / (examples of m): [n]. A concept beyond the
    table has no clients.
    """
    owner, step = records["owner"], np.clip(records["time_step"], 0, len(shares) - 1)
    known = (owner >= 0) & (owner < shares.shape[1])
    share = np.where(known, shares[step, np.where(known, owner, 0)], np.where(owner < 0, 1.0, 0.0))
    return np.asarray(share / np.maximum(records["total"].sum(axis=1), 1))


def on_examples_of(records: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which records evaluate examples (round, owner) that the others evaluate too: [n] bool."""
    pairs = set(zip(others["round"].tolist(), others["owner"].tolist(), strict=True))
    return np.array(
        [
            pair in pairs
            for pair in zip(records["round"].tolist(), records["owner"].tolist(), strict=True)
        ],
        dtype=bool,
    )
