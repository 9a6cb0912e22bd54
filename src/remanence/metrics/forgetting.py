"""What models forget, each measure defined once: positive = forgotten, and the name says against
what.

roundwise_forgetting    the global model against the recorded round before          Flashback
(Aljahdali et al., 2023) forgetting_since_best   the last round against the best one before
FedNTD (Lee et al., 2022) local_forgetting        a client's trained model against what it was
trained from   Flashback client_forgetting       the same, on each other client's data: F_ki and F_k
WSM (Legate, 2022), eq. 11-12 where_lost              which phase of a round lost it
here, see phase_decomposition.py became                  what a forgotten class is taken for
here
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import (
    accuracy_of,
    concept_shares,
    divide,
    local_models,
    nan_mean,
)
from remanence.metrics.phase_decomposition import (
    PHASES,
    ClientLosses,
    PhaseDecomposition,
    local_losses_by_client,
    phase_decomposition,
)
from remanence.results.ledger import GLOBAL, MOMENTS, SPLITS, Ledger

if TYPE_CHECKING:
    from remanence.results.run import Run

__all__ = [
    "PHASES",
    "ClientForgetting",
    "ClientLosses",
    "LocalForgetting",
    "PhaseDecomposition",
    "class_drops",
    "class_forgetting_since_best",
    "client_forgetting",
    "client_forgetting_rounds",
    "concept_shares",
    "confusion_change",
    "confusion_of_forgotten",
    "forgetting_curve",
    "forgetting_since_best",
    "local_forgetting",
    "local_losses_by_client",
    "phase_decomposition",
    "roundwise_forgetting",
]  # fmt: skip


@dataclass(frozen=True)
class LocalForgetting:
    """Local forgetting of every recorded local model."""

    round: np.ndarray  # [n]
    client: np.ndarray  # [n]
    value: np.ndarray  # [n] mean over classes
    per_class: np.ndarray  # [n, C] the drop only


@dataclass(frozen=True)
class ClientForgetting:
    """Client k's model on client i's validation rows, in one round; rows are models, columns
    are data.
    """

    round: int
    clients: np.ndarray  # [n]
    before: np.ndarray  # [n] Acc_i(w_t), the global model as the clients received it
    after: np.ndarray  # [n, n] Acc_i(w_k)
    difference: np.ndarray  # [n, n] F_ki = Acc_i(w_t) - Acc_i(w_k)
    mean: np.ndarray  # [n] F_k, the mean over i != k


def class_drops(per_class: Any) -> np.ndarray:
    """What each class lost from one recorded round to the next; gains count as 0. [T, C] -> [T - 1,
    C], NaN where a class has no examples

    >>> class_drops([[0.75, 0.25], [0.5, 1.0]])
    array([[0.25, 0.  ]])
    """
    shares = np.asarray(per_class, dtype=float)
    return np.asarray(np.maximum(shares[:-1] - shares[1:], 0.0))


def roundwise_forgetting(per_class: Any) -> np.ndarray:
    """Round-wise global forgetting (Flashback): 1/C sum_c max(0, A_{t-1}^c - A_t^c), the drop only.
    [T, C] -> [T - 1]

    Positive = forgotten, against the recorded round before. Class 0 loses 0.5 and class 1 gains
    0.25, so (0.5 + 0) / 2 was forgotten:

    >>> roundwise_forgetting([[1.0, 0.5], [0.5, 0.75]])
    array([0.25])

    A class without test examples (NaN) is left out of the mean:

    >>> roundwise_forgetting([[1.0, float("nan")], [0.5, float("nan")]])
    array([0.5])
    """
    return nan_mean(class_drops(per_class), axis=1)


def forgetting_curve(run: Run) -> dict[int, float]:
    """Round-wise forgetting of the model that counts (the global one, or the clients' own), by
    the round that lost it.
    """
    model = run.metadata.get("evaluated", "global")
    lines = [
        line
        for line in run.metrics
        if line["split"] == "test" and line["model"] == model and line.get("per_class")
    ]
    if len(lines) < 2:
        return {}
    shares = [
        [math.nan if share is None else float(share) for share in line["per_class"]]
        for line in lines
    ]
    lost = roundwise_forgetting(shares)
    return {
        int(line["round"]): float(value)
        for line, value in zip(lines[1:], lost, strict=True)
        if not np.isnan(value)
    }


def class_forgetting_since_best(per_class: Any) -> np.ndarray:
    """max_{t<T} A_t^c - A_T^c for each class: negative where the last round is the best yet, NaN
    with a single round. [T, C] -> [C]

    >>> class_forgetting_since_best([[0.25, 0.5], [1.0, 0.5], [0.75, 1.0]])
    array([ 0.25, -0.5 ])
    """
    shares = np.asarray(per_class, dtype=float)
    earlier = np.where(np.isnan(shares[:-1]), -np.inf, shares[:-1]).max(axis=0, initial=-np.inf)
    return np.asarray(np.where(np.isneginf(earlier), np.nan, earlier) - shares[-1])


def forgetting_since_best(per_class: Any) -> float:
    """FedNTD's F: 1/C sum_c (max_{t<T} A_t^c - A_T^c), the last round against the best before it,
    class by class. [T, C] -> number

    Class 0 lost 0.5 since its best round and class 1 gained 0.25:

    >>> forgetting_since_best([[1.0, 0.25], [0.75, 0.5], [0.5, 0.75]])
    0.125
    """
    return float(nan_mean(class_forgetting_since_best(per_class)))


def local_forgetting(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> LocalForgetting:
    """Local forgetting (Flashback): 1/C sum_c max(0, A_start^c - A_k^c), the drop only, for every
    recorded local model k.

    The start is the round's global model as the clients received it or, without a server, the
    client's own model after mixing with its peers.

    >>> from remanence.results.ledger import make_record
    >>> start = make_record(2, np.array([[4, 0], [2, 2]]), round=1, moment="before", split="test", model=-1, owner=-1)
    >>> after = make_record(2, np.array([[2, 2], [0, 4]]), round=1, moment="local", split="test", model=7, owner=-1)
    >>> lost = local_forgetting(Ledger(np.concatenate([start, after]), ["cat", "dog"]))  # cats: 1 -> 0.5; dogs: 0.5 -> 1
    >>> lost.client, lost.value
    (array([7], dtype=int32), array([0.25]))

    shares: the concepts' shares of the clients [T, M] (`concept_shares`), needed where a model was
        judged on several concepts.
    """
    local = local_models(ledger, split, shares)
    drops = np.maximum(local.start - local.end, 0.0)
    return LocalForgetting(local.round, local.client, nan_mean(drops, axis=1), drops)


def client_forgetting_rounds(ledger: Ledger) -> list[int]:
    """The rounds for which F_ki is known."""
    before, local = (
        set(ledger.records["round"][chosen].tolist()) for chosen in _find_cross(ledger)
    )
    return sorted(before & local)


def client_forgetting(ledger: Ledger, round: int | None = None) -> ClientForgetting:
    """Local client forgetting (WSM eq. 11-12): F_ki = Acc_i(w_t) - Acc_i(w_k), client k's model on
    client i's data; F_k = mean over i != k.

    Positive = forgotten, against the global model that the round began with. Data are validation
    rows. Client 0's training costs client 1 a half:

    >>> from remanence.results.ledger import make_record
    >>> def judged(right, moment, model, owner):
    ...     return make_record(1, np.array([[right]]), round=1, moment=moment, split="valid", model=model, owner=owner)
    >>> rows = [judged(2, "before", -1, 0), judged(2, "before", -1, 1), judged(2, "local", 0, 0), judged(1, "local", 0, 1),
    ...         judged(2, "local", 1, 0), judged(2, "local", 1, 1)]
    >>> for row in rows:
    ...     row["total"] = 2
    >>> client_forgetting(Ledger(np.concatenate(rows), ["cat"])).mean
    array([0.5, 0. ])

    round: the last one recorded unless named.
    """
    known = client_forgetting_rounds(ledger)
    if not known:
        raise InputError(
            "the ledger does not have the clients' models on each other's validation rows: run"
            " with record.local = true"
        )
    if round is not None and round not in known:
        raise InputError(
            f"round {round} does not have the clients' models on each other's validation rows:"
            f" {_name_rounds(known)}"
        )
    chosen = known[-1] if round is None else round
    here = ledger.records["round"] == chosen
    before, local = (ledger.records[found & here] for found in _find_cross(ledger))
    clients = np.unique(np.concatenate([local["model"], before["owner"]]))
    start, after = np.full(len(clients), np.nan), np.full((len(clients), len(clients)), np.nan)
    local = local[np.isin(local["owner"], clients)]
    start[np.searchsorted(clients, before["owner"])] = accuracy_of(before)
    after[np.searchsorted(clients, local["model"]), np.searchsorted(clients, local["owner"])] = (
        accuracy_of(local)
    )
    difference = start[None, :] - after
    others = np.where(np.eye(len(clients), dtype=bool), np.nan, difference)
    return ClientForgetting(chosen, clients, start, after, difference, nan_mean(others, axis=1))


def confusion_change(before: Any, after: Any) -> np.ndarray:
    """What classes are taken for that were not before: after's rates minus before's, rows true,
    columns predicted. [C, C], [C, C] -> [C, C]

    Positive = moved there; on the diagonal the gain of the class, negative where it was forgotten.
    A row adds up to 0; NaN for a class without examples. Of four cats three were right; now one is,
    and two more are taken for dogs:

    >>> confusion_change([[3, 1], [0, 0]], [[1, 3], [0, 0]])
    array([[-0.5,  0.5],
           [ nan,  nan]])
    """
    earlier, later = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return np.asarray(
        divide(later, later.sum(axis=1, keepdims=True))
        - divide(earlier, earlier.sum(axis=1, keepdims=True))
    )


def confusion_of_forgotten(
    confusions: np.ndarray,
    label: int,
    rounds: tuple[int, int] | None = None,
    *,
    moment: str | None = None,
    split: str = "test",
    model: int | None = GLOBAL,
) -> np.ndarray:
    """Where the examples of one class went between two recorded rounds (the first and the last
    unless named): row `label` of `confusion_change`. -> [C]

    moment: that of the finished round unless named (refined where the server trains, personal where
    the models that count are the clients' own). Rows of several owners count together; model None
    counts all models together.
    """
    kept = confusions[confusions["split"] == SPLITS.index(split)]
    kept = kept if model is None else kept[kept["model"] == model]
    ends = [
        name
        for name in ("personal", "refined", "merged")
        if (kept["moment"] == MOMENTS.index(name)).any()
    ]
    wanted = moment or next(iter(ends), "merged")
    kept = kept[kept["moment"] == MOMENTS.index(wanted)]
    known = sorted(set(kept["round"].tolist()))
    if len(known) < 2:
        raise InputError(
            f"two rounds with confusion matrices are needed and {len(known)} were recorded:"
            " run with record.confusion = true"
        )
    first, last = rounds or (known[0], known[-1])
    for round in (first, last):
        if round not in known:
            raise InputError(f"round {round} has no confusion matrix: {_name_rounds(known)}")
    return np.asarray(
        confusion_change(
            *(kept["confusion"][kept["round"] == round].sum(axis=0) for round in (first, last))
        )[label]
    )


def _find_cross(ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """Which records are the global model's, and which the clients', on single clients'
    validation rows: masks, for the records of large runs fill memory.
    """
    records = ledger.records
    rows = (records["split"] == SPLITS.index("valid")) & (records["owner"] >= 0)
    before = rows & (records["moment"] == MOMENTS.index("before")) & (records["model"] == GLOBAL)
    return before, rows & (records["moment"] == MOMENTS.index("local")) & (records["model"] >= 0)


def _name_rounds(known: list[int]) -> str:
    return f"recorded are {len(known)} rounds from {known[0]} to {known[-1]}"
