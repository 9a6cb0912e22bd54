"""The change of confusion matrices: which classes the examples of a forgotten class are classified
as, between two rounds and on average.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import divide, nan_mean
from remanence.metrics.forgetting import describe_rounds
from remanence.results.ledger import GLOBAL, MOMENTS, SPLITS


def confusion_change(before: Any, after: Any) -> np.ndarray:
    """The change of a confusion matrix: rates after minus rates before.

    Args:
        before: Counts [C, C], rows true, columns predicted.
        after: Counts [C, C].

    Returns:
        Differences [C, C]. The diagonal is the gain of the class, negative if it was forgotten. A
        row sums to 0, and is NaN for a class without examples.

    Of four cats three were classified correctly, now one is; two more are classified as dogs:

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
    """Row `label` of `confusion_change` between two recorded rounds: the change of the predictions
    for the examples of one class [C].

    Args:
        confusions: The records of `run.confusions`. Records of several owners are added.
        label: The class.
        rounds: The two rounds. Default: the first and the last recorded one.
        moment: The moment of the round. Default: the last one of a round, see `last_moment`.
        split: The split.
        model: The model. None: all models together.
    """
    kept = confusions[confusions["split"] == SPLITS.index(split)]
    kept = kept if model is None else kept[kept["model"] == model]
    kept = kept[kept["moment"] == MOMENTS.index(moment or last_moment(kept))]
    known = sorted(set(kept["round"].tolist()))
    if len(known) < 2:
        raise InputError(
            f"two rounds with confusion matrices are needed and {len(known)} were recorded:"
            " run with record.confusion = true"
        )
    first, last = rounds or (known[0], known[-1])
    for round in (first, last):
        if round not in known:
            raise InputError(f"round {round} has no confusion matrix: {describe_rounds(known)}")
    return np.asarray(
        confusion_change(
            *(kept["confusion"][kept["round"] == round].sum(axis=0) for round in (first, last))
        )[label]
    )


def mean_confusion_of_forgotten(confusions: np.ndarray) -> np.ndarray | None:
    """What the examples that a model forgets from one recorded round to the next are predicted as.

    Args:
        confusions: Records of one split and moment. Records of a round are added.

    Returns:
        Shares [C, C] of the examples of a class, averaged over rounds: rows true, columns
        predicted. A class that gains in a round counts as 0. None with fewer than two rounds.

    Three of four cats are forgotten and classified as dogs:

    >>> from remanence.results.ledger import confusion_type
    >>> records = np.zeros(2, dtype=confusion_type(2))
    >>> records["round"], records["confusion"] = [1, 2], [[[4, 0], [0, 4]], [[1, 3], [0, 4]]]
    >>> mean_confusion_of_forgotten(records)
    array([[0.  , 0.75],
           [0.  , 0.  ]])
    """
    rounds = np.unique(confusions["round"])
    if len(rounds) < 2:
        return None
    tables = [confusions["confusion"][confusions["round"] == round].sum(axis=0) for round in rounds]
    changes = [confusion_change(earlier, later) for earlier, later in pairwise(tables)]
    drops = [
        np.where(
            np.diagonal(change)[:, None] < 0,
            np.maximum(change, 0.0),
            np.where(np.isnan(change), np.nan, 0.0),
        )
        for change in changes
    ]
    return nan_mean(np.stack(drops), axis=0)


def last_moment(confusions: np.ndarray) -> str:
    """The last moment of a round that has records: "personal" for personal models, "refined" if the
    server trains, otherwise "merged".
    """
    for name in ("personal", "refined"):
        if (confusions["moment"] == MOMENTS.index(name)).any():
            return name
    return "merged"
