"""Differences between clients: the spread of accuracy over clients, the worst clients, and the
accuracy of a client's model on labels that it has and on labels that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.metrics.accuracy_tables import accuracy_of, divide, local_models
from remanence.results.ledger import Ledger


@dataclass(frozen=True)
class ClientAccuracies:
    """The accuracy of each client in one round."""

    round: int
    clients: np.ndarray  # [n] ascending
    accuracy: np.ndarray  # [n]


@dataclass(frozen=True)
class LocalAccuracies:
    """Accuracies of every recorded local model on the test set, weighted by the labels that its
    client has (in-local) and by those that it lacks (out-local).
    """

    round: np.ndarray  # [n]
    client: np.ndarray  # [n]
    in_local: np.ndarray  # [n]
    out_local: np.ndarray  # [n]


def accuracy_spread(accuracies: Any) -> float:
    """The population standard deviation over clients; clients without examples (NaN) are left out.

    >>> accuracy_spread([0.25, 0.75, float("nan")])
    0.25
    """
    known = _known(accuracies)
    return float(known.std()) if len(known) else float("nan")


def worst_client(accuracies: Any) -> float:
    """The lowest accuracy of any client.

    >>> worst_client([0.5, 0.25, float("nan")])
    0.25
    """
    known = _known(accuracies)
    return float(known.min()) if len(known) else float("nan")


def bottom_decile(accuracies: Any) -> float:
    """The mean accuracy of the worst 10% of the clients (rounded down, but at least one).

    >>> bottom_decile([0.5, 0.25, *[1.0] * 18])  # two of twenty
    0.375
    """
    known = np.sort(_known(accuracies))
    return float(known[: max(1, len(known) // 10)].mean()) if len(known) else float("nan")


def accuracy_by_client(
    ledger: Ledger, moment: str = "personal", split: str = "valid", round: int | None = None
) -> ClientAccuracies | None:
    """Accuracy on each client's own examples, of the client's personal model where the moment has
    one, otherwise of the global model.

    Args:
        ledger: The ledger.
        moment: The moment of the round.
        split: The split of the examples.
        round: The round. Default: the last recorded one.

    Returns:
        The accuracies, or None if they were not recorded.
    """
    records = ledger.select(moment=moment, split=split)
    own = records[
        (records["owner"] >= 0) & ((records["model"] == records["owner"]) | (records["model"] < 0))
    ]
    own = own[own["round"] == (own["round"].max(initial=0) if round is None else round)]
    if not len(own):
        return None
    if (own["model"] >= 0).any():
        own = own[own["model"] >= 0]
    own = own[np.argsort(own["owner"], kind="stable")]
    return ClientAccuracies(int(own["round"][0]), own["owner"], accuracy_of(own))


def in_local_accuracy(per_class: Any, label_counts: Any) -> np.ndarray:
    """FedNTD's in-local accuracy: sum_c p_c A^c, with p the shares of the client's own labels
    (Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
    Learning", NeurIPS 2022).

    Args:
        per_class: Accuracies by class [..., C]. Classes without test examples (NaN) are left out,
            and the weights of the others are scaled to sum to 1.
        label_counts: The client's labels [..., C].

    Returns:
        Accuracies [...].

    A client with three cats and a dog, whose model classifies only cats correctly:

    >>> in_local_accuracy([1.0, 0.0], [3, 1])
    array(0.75)
    """
    return _weighted(per_class, _shares(label_counts))


def out_local_accuracy(per_class: Any, label_counts: Any) -> np.ndarray:
    """FedNTD's out-local accuracy: sum_c q_c A^c, with q_c = (1 - p_c) / (C - 1), which sum to 1.
    Arguments and results are those of `in_local_accuracy`.

    NaN with a single class. With two classes, q swaps the shares of the client above:

    >>> out_local_accuracy([1.0, 0.0], [3, 1])
    array(0.25)
    """
    shares = _shares(label_counts)
    return _weighted(per_class, (1 - shares) / max(shares.shape[-1] - 1, 1))


def local_accuracies(
    ledger: Ledger, label_counts: Any, shares: np.ndarray | None = None
) -> LocalAccuracies:
    """In-local and out-local accuracy of every recorded local model on the test set.

    Args:
        ledger: The ledger.
        label_counts: Training labels of each client [K, C], as in `run.metadata`.
        shares: As in `forgetting.local_forgetting`.
    """
    local = local_models(ledger, "test", shares)
    counts = np.asarray(label_counts).reshape(-1, len(ledger.class_names))[local.client]  # [n, C]
    return LocalAccuracies(
        local.round,
        local.client,
        in_local_accuracy(local.end, counts),
        out_local_accuracy(local.end, counts),
    )


def _known(values: Any) -> np.ndarray:
    numbers = np.asarray(values, dtype=float).reshape(-1)
    return np.asarray(numbers[~np.isnan(numbers)])


def _shares(label_counts: Any) -> np.ndarray:
    counts = np.asarray(label_counts, dtype=float)
    return divide(counts, counts.sum(axis=-1, keepdims=True))


def _weighted(per_class: Any, weights: np.ndarray) -> np.ndarray:
    """The weighted mean over the classes that have examples; NaN where they have no weight."""
    accuracy = np.asarray(per_class, dtype=float)
    weights = np.where(np.isnan(accuracy) | np.isnan(weights), 0.0, weights)
    return divide(
        (weights * np.where(np.isnan(accuracy), 0.0, accuracy)).sum(axis=-1), weights.sum(axis=-1)
    )
