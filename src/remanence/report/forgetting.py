"""Round-wise forgetting of the global model, from the accuracy per class that every recorded round writes down."""

from __future__ import annotations

from typing import Any

import numpy as np

from remanence.report.groups import class_curve, nan_mean
from remanence.results import Run


def class_drops(per_class: Any) -> np.ndarray:
    """What each class lost from one recorded round to the next; gains count as 0. [T, C] -> [T - 1, C], NaN where a class has no examples

    >>> class_drops([[0.75, 0.25], [0.5, 1.0]])
    array([[0.25, 0.  ]])
    """
    shares = np.asarray(per_class, dtype=float)
    return np.asarray(np.maximum(shares[:-1] - shares[1:], 0.0))


def roundwise_forgetting(per_class: Any) -> np.ndarray:
    """Round-wise global forgetting (Flashback): 1/C sum_c max(0, A_{t-1}^c - A_t^c), the drop only. [T, C] -> [T - 1]

    Positive = forgotten, against the recorded round before. Class 0 loses 0.5 and class 1 gains 0.25, so (0.5 + 0) / 2 was forgotten:

    >>> roundwise_forgetting([[1.0, 0.5], [0.5, 0.75]])
    array([0.25])

    A class without test examples (NaN) is left out of the mean:

    >>> roundwise_forgetting([[1.0, float("nan")], [0.5, float("nan")]])
    array([0.5])
    """
    return nan_mean(class_drops(per_class), axis=1)


def forgetting_curve(run: Run) -> dict[int, float]:
    """Round-wise forgetting by the round that lost it."""
    rounds, shares = class_curve(run)
    if len(rounds) < 2:
        return {}
    return {int(r): float(lost) for r, lost in zip(rounds[1:], roundwise_forgetting(shares), strict=True) if not np.isnan(lost)}
