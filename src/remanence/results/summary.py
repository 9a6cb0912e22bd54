"""Accuracy, loss and F1 from a confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np


def summarize(confusion: np.ndarray, loss_sum: float) -> dict[str, Any]:
    """Accuracy, accuracy per class (None for a class without examples), mean loss and macro F1.

    >>> summarize(np.array([[3, 1], [0, 0]]), 2.0)
    {'accuracy': 0.75, 'per_class': [0.75, None], 'loss': 0.5, 'macro_f1': 0.8571428571428571}

    Macro F1 is the mean over the classes that the data contain; above: 2 * 3 / (3 + 4), since 3
    were predicted as class 0 and 4 are.
    """
    confusion = np.asarray(confusion)  # counts, or shares of them where concepts are weighted
    correct, total, predicted = np.diagonal(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    present = total > 0
    count = total.sum()
    per_class = [float(c / t) if t else None for c, t in zip(correct, total, strict=True)]
    f1 = 2 * correct[present] / (predicted[present] + total[present])
    mean_loss = loss_sum / count if count else float("nan")
    return {
        "accuracy": float(correct.sum() / count) if count else None,
        "per_class": per_class,
        "loss": float(mean_loss) if np.isfinite(mean_loss) else None,
        "macro_f1": float(f1.mean()) if present.any() else None,
    }
