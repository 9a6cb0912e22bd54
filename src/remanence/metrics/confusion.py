"""The change of confusion matrices: which classes the examples of a forgotten class are classified
as.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import divide
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
        moment: The moment of the round. Default: the last one of a round ("personal" for personal
            models, "refined" if the server trains, otherwise "merged").
        split: The split.
        model: The model. None: all models together.
    """
    kept = confusions[confusions["split"] == SPLITS.index(split)]
    kept = kept if model is None else kept[kept["model"] == model]
    ends = [
        name
        for name in ("personal", "refined", "merged")
        if (kept["moment"] == MOMENTS.index(name)).any()
    ]
    moment = moment or next(iter(ends), "merged")
    kept = kept[kept["moment"] == MOMENTS.index(moment)]
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
