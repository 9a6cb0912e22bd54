"""Measures of forgetting. Positive values mean forgotten.

- `roundwise_forgetting`: the global model against the previous recorded round (Flashback, Aljahdali
  et al., 2023)
- `forgetting_since_best`: the last round against the best earlier one (FedNTD, Lee et al., 2022)
- `local_forgetting`: a local model against the model it was trained from (Flashback)
- `client_forgetting`: the same on the data of each other client, F_ki and F_k (WSM, Legate, 2022,
  eq. 11-12)

`phase_decomposition` splits the loss of a round over its phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import accuracy_of, local_models, nan_mean
from remanence.metrics.groups import class_curve
from remanence.results.ledger import GLOBAL, MOMENTS, SPLITS, Ledger

if TYPE_CHECKING:
    from remanence.results.run import Run


@dataclass(frozen=True)
class LocalForgetting:
    """Local forgetting of every recorded local model."""

    round: np.ndarray  # [n]
    client: np.ndarray  # [n]
    value: np.ndarray  # [n] mean over classes
    per_class: np.ndarray  # [n, C] gains count as 0


@dataclass(frozen=True)
class ClientForgetting:
    """Client k's model on client i's validation examples in one round. Rows are models, columns are
    data.
    """

    round: int
    clients: np.ndarray  # [n]
    before: np.ndarray  # [n] Acc_i(w_t), of the global model that the clients received
    after: np.ndarray  # [n, n] Acc_i(w_k)
    difference: np.ndarray  # [n, n] F_ki = Acc_i(w_t) - Acc_i(w_k)
    mean: np.ndarray  # [n] F_k, the mean over i != k


def class_drops(per_class: Any) -> np.ndarray:
    """The loss of accuracy of each class from one recorded round to the next; gains count as 0.

    Args:
        per_class: Accuracies by class [T, C], with NaN for classes without examples.

    Returns:
        Losses [T - 1, C].

    >>> class_drops([[0.75, 0.25], [0.5, 1.0]])
    array([[0.25, 0.  ]])
    """
    shares = np.asarray(per_class, dtype=float)
    return np.asarray(np.maximum(shares[:-1] - shares[1:], 0.0))


def roundwise_forgetting(per_class: Any) -> np.ndarray:
    """Round-wise global forgetting (Flashback): 1/C sum_c max(0, A_{t-1}^c - A_t^c).

    Args:
        per_class: Accuracies by class [T, C], with NaN for classes without examples.

    Returns:
        Forgetting [T - 1], against the previous recorded round.

    Class 0 loses 0.5 and class 1 gains 0.25, so (0.5 + 0) / 2 was forgotten:

    >>> roundwise_forgetting([[1.0, 0.5], [0.5, 0.75]])
    array([0.25])

    A class without test examples (NaN) is left out of the mean:

    >>> roundwise_forgetting([[1.0, float("nan")], [0.5, float("nan")]])
    array([0.5])
    """
    return nan_mean(class_drops(per_class), axis=1)


def forgetting_curve(run: Run) -> dict[int, float]:
    """Round-wise forgetting of the primary model (global, or the clients' own), by round."""
    rounds, shares = class_curve(run)
    lost = roundwise_forgetting(shares)
    return {
        int(round): float(value)
        for round, value in zip(rounds[1:], lost, strict=True)
        if not np.isnan(value)
    }


def require_every_round(run: Run, measure: str) -> None:
    """Raise InputError unless the run recorded every round, where a measure is from round to round
    and would otherwise become one over several rounds.

    Args:
        run: The run.
        measure: Its name, for the error.
    """
    every = run.config.record.every
    if every > 1:
        raise InputError(
            f"{measure} compares every round with the one before, and {run.folder} recorded every"
            f" {every} rounds: run it again with record.every=1"
        )


def class_forgetting_since_best(per_class: Any) -> np.ndarray:
    """max_{t<T} A_t^c - A_T^c for each class: [T, C] -> [C]. Negative if the last round is the
    best, NaN with a single round.

    >>> class_forgetting_since_best([[0.25, 0.5], [1.0, 0.5], [0.75, 1.0]])
    array([ 0.25, -0.5 ])
    """
    shares = np.asarray(per_class, dtype=float)
    earlier = np.where(np.isnan(shares[:-1]), -np.inf, shares[:-1]).max(axis=0, initial=-np.inf)
    return np.asarray(np.where(np.isneginf(earlier), np.nan, earlier) - shares[-1])


def forgetting_since_best(per_class: Any) -> float:
    """FedNTD's F: 1/C sum_c (max_{t<T} A_t^c - A_T^c), the last round against the best earlier one
    of each class. Accuracies by class [T, C] -> number.

    Class 0 lost 0.5 since its best round and class 1 gained 0.25:

    >>> forgetting_since_best([[1.0, 0.25], [0.75, 0.5], [0.5, 0.75]])
    0.125
    """
    return float(nan_mean(class_forgetting_since_best(per_class)))


def local_forgetting(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> LocalForgetting:
    """Local forgetting (Flashback): 1/C sum_c max(0, A_start^c - A_k^c) for every recorded local
    model k.

    The start is the global model that the client received or, without a server, the client's own
    model after mixing with its peers.

    Args:
        ledger: The ledger.
        split: The split on which the models were evaluated.
        shares: The share of the clients in each concept [T, M], as `concept_shares` returns it.
            Required if models were evaluated on several concepts.

    Client 7 loses half of the cats (1 -> 0.5) and gains dogs (0.5 -> 1):

    >>> from remanence.results.ledger import make_record
    >>> def evaluated(counts, **columns):
    ...     return make_record(2, np.array(counts), round=1, split="test", owner=-1, **columns)
    >>> start = evaluated([[4, 0], [2, 2]], moment="before", model=-1)
    >>> after = evaluated([[2, 2], [0, 4]], moment="local", model=7)
    >>> lost = local_forgetting(Ledger(np.concatenate([start, after]), ["cat", "dog"]))
    >>> lost.client, lost.value
    (array([7], dtype=int32), array([0.25]))
    """
    local = local_models(ledger, split, shares)
    drops = np.maximum(local.start - local.end, 0.0)
    return LocalForgetting(local.round, local.client, nan_mean(drops, axis=1), drops)


def client_forgetting_rounds(ledger: Ledger) -> list[int]:
    """The rounds for which F_ki was recorded."""
    before, local = (
        set(ledger.records["round"][chosen].tolist()) for chosen in _find_cross(ledger)
    )
    return sorted(before & local)


def client_forgetting(ledger: Ledger, round: int | None = None) -> ClientForgetting:
    """Local client forgetting (WSM eq. 11-12): F_ki = Acc_i(w_t) - Acc_i(w_k), client k's model on
    client i's validation examples against the global model that the clients received; F_k is the
    mean over i != k.

    Args:
        ledger: The ledger.
        round: The round. Default: the last recorded one.

    Client 0's local training costs client 1 one of its two examples:

    >>> from remanence.results.ledger import make_record
    >>> def evaluated(right, **columns):
    ...     record = make_record(1, np.array([[right]]), round=1, split="valid", **columns)
    ...     record["total"] = 2
    ...     return record
    >>> records = [evaluated(2, moment="before", model=-1, owner=client) for client in (0, 1)]
    >>> records += [evaluated(2, moment="local", model=0, owner=0)]
    >>> records += [evaluated(1, moment="local", model=0, owner=1)]
    >>> records += [evaluated(2, moment="local", model=1, owner=client) for client in (0, 1)]
    >>> client_forgetting(Ledger(np.concatenate(records), ["cat"])).mean
    array([0.5, 0. ])
    """
    known = client_forgetting_rounds(ledger)
    if not known:
        raise InputError(
            "the ledger has no clients' models on each other's validation examples: run"
            " with record.local = true"
        )
    if round is not None and round not in known:
        raise InputError(
            f"round {round} has no clients' models on each other's validation examples:"
            f" {describe_rounds(known)}"
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


def _find_cross(ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the records of the global model and of local models on single clients' validation
    examples. Masks, since the records of large runs fill the memory.
    """
    records = ledger.records
    single = (records["split"] == SPLITS.index("valid")) & (records["owner"] >= 0)
    before = single & (records["moment"] == MOMENTS.index("before")) & (records["model"] == GLOBAL)
    return before, single & (records["moment"] == MOMENTS.index("local")) & (records["model"] >= 0)


def describe_rounds(known: list[int]) -> str:
    """The recorded rounds, for errors."""
    return f"recorded are {len(known)} rounds from {known[0]} to {known[-1]}"
