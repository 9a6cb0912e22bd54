"""From counts to accuracies: what every measure begins with. A class without examples is NaN,
and NaN never warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.results.ledger import GLOBAL, Ledger


@dataclass(frozen=True)
class ModelAccuracies:
    """Models at moments, one row a round and model."""

    round: np.ndarray  # [n]
    time_step: np.ndarray  # [n]
    model: np.ndarray  # [n] a client's number, or GLOBAL
    weight: np.ndarray  # [n] share in the aggregation
    per_class: np.ndarray  # [n, C]


@dataclass(frozen=True)
class LocalModels:
    """Models after local training, each beside the accuracy of what it was trained from."""

    round: np.ndarray  # [n]
    client: np.ndarray  # [n]
    weight: np.ndarray  # [n]
    start: np.ndarray  # [n, C]
    end: np.ndarray  # [n, C]


def nan_mean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """The mean without NaN, and NaN (without a warning) where nothing else is there.

    >>> nan_mean(np.array([[0.5, np.nan], [1.0, np.nan]]), axis=0)
    array([0.75,  nan])
    """
    there = ~np.isnan(values)
    count = there.sum(axis=axis)
    total = np.where(there, values, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, and NaN where the whole is 0."""
    return np.asarray(np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan))


def accuracy_of(records: np.ndarray) -> np.ndarray:
    """Accuracy over all classes of each record. -> [n]"""
    return divide(records["correct"].sum(axis=-1), records["total"].sum(axis=-1))


def concept_shares(clusters: Any) -> np.ndarray:
    """The share of the clients in each concept at each time step, from `run.about["clusters"]`. [T,
    K] -> [T, M]

    >>> concept_shares([[0, 0, 0, 1], [0, 1, 1, 1]])
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    table = np.asarray(clusters, dtype=np.int64)
    return np.stack([np.bincount(row, minlength=int(table.max()) + 1) / len(row) for row in table])


def accuracies_by_model(records: np.ndarray, shares: np.ndarray | None = None) -> ModelAccuracies:
    """Accuracy per class of each model in each round; records of one model on several concepts
    become one.

    With shares [T, M], concept m's rows count share_m / (rows of m), so that the accuracy over all
    classes is sum_m share_m acc_m: the mean over clients, each on its own concept. Without, all
    rows count the same.
    """
    keys, first, group = np.unique(
        np.stack([records["round"], records["model"]]),
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    count, classes = keys.shape[1], records["correct"].shape[1]
    importance = np.ones(len(records)) if shares is None else _importance(records, shares)
    correct, total = np.zeros((count, classes)), np.zeros((count, classes))
    np.add.at(correct, group.reshape(-1), records["correct"] * importance[:, None])
    np.add.at(total, group.reshape(-1), records["total"] * importance[:, None])
    return ModelAccuracies(
        keys[0],
        records["time_step"][first],
        keys[1],
        records["weight"][first],
        divide(correct, total),
    )


def select_whole(ledger: Ledger, moment: str, split: str, shares: np.ndarray | None) -> np.ndarray:
    """The records that together are one judgement a model: every concept of the test set, or
    the rows of each client that was asked.
    """
    records = ledger.select(moment=moment, split=split)
    if split != "test":
        return np.asarray(records[records["owner"] >= 0])
    if shares is None and len(
        set(zip(records["round"].tolist(), records["model"].tolist(), strict=True))
    ) < len(records):
        raise InputError(
            "the ledger has several concepts: say how many clients are in each with"
            ' shares=concept_shares(run.about["clusters"])'
        )
    return records


def local_models(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> LocalModels:
    """Every recorded local model with its start: the round's global model as received, or, without
    a server, the client's own model after mixing.

    On validation rows (`split="valid"`) both are judged on the rows of the round's recorded
    participants together. Rounds with several global models are left
    out: the ledger does not say which of them a client received.
    """
    ends = select_whole(ledger, "local", split, shares)
    starts = select_whole(ledger, "merged" if is_decentralized(ledger) else "before", split, shares)
    if split != "test":  # the same rows on both sides
        ends, starts = ends[on_rows_of(ends, starts)], starts[on_rows_of(starts, ends)]
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
    """Do clients mix models of their own?"""
    return bool((ledger.select(moment="merged")["model"] >= 0).any())


def _importance(records: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """share_m / (rows of m) for each record; a concept beyond the table has nobody in it. -> [n]"""
    owner, step = records["owner"], np.clip(records["time_step"], 0, len(shares) - 1)
    known = (owner >= 0) & (owner < shares.shape[1])
    share = np.where(known, shares[step, np.where(known, owner, 0)], np.where(owner < 0, 1.0, 0.0))
    return np.asarray(share / np.maximum(records["total"].sum(axis=1), 1))


def on_rows_of(records: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which records are on rows (round, owner) that the others have too. -> [n] bool"""
    pairs = set(zip(others["round"].tolist(), others["owner"].tolist(), strict=True))
    return np.array(
        [
            pair in pairs
            for pair in zip(records["round"].tolist(), records["owner"].tolist(), strict=True)
        ],
        dtype=bool,
    )
