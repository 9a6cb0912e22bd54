"""Accuracy under drift as the numbers of HAST's table A.8 were computed.

Section 3.5 of the thesis (Klefbom and Toftås, 2023) describes measures of single clients on test
examples; these are in `drift`. Its authors' program computes others, and the printed numbers are
theirs. Everything here is read off one curve, the validation accuracy of the clients' current
models after every round, averaged over clients and seeds first. It is an array [T, R]: time steps
by their rounds.

The first time step follows no drift and has no number. What the thesis prints after "±" is the
deviation over time steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.drift_curves import drift_curves

if TYPE_CHECKING:
    from remanence.results.run import Run


def validation_curve(runs: Sequence[Run]) -> np.ndarray | None:
    """The validation accuracy of the clients' current models, mean over clients, then over runs.

    Args:
        runs: Of one experiment, with different seeds.

    Returns:
        [T, R]; None where a round of some run has none, as in runs with a server.
    """
    curves = []
    for run in runs:
        rounds, values = run.curve(value="valid_accuracy")
        if rounds != list(range(1, run.config.total_rounds + 1)):
            return None
        curves.append(np.array(values).reshape(-1, run.config.rounds))
    return np.mean(curves, axis=0) if curves else None


def rounds_to_gain(curve: np.ndarray, fraction: float = 0.9) -> np.ndarray:
    """Rounds from the start of a time step to 90% of its gain from its first round to its last.

    A time step without a gain has 1, since its first round is above the goal.

    >>> curve = np.array([[0.0, 0.0, 0.0], [0.25, 0.75, 0.75], [0.75, 0.5, 0.5]])
    >>> rounds_to_gain(curve).tolist()
    [2, 1]
    """
    later = curve[1:]
    goals = later[:, 0] + fraction * (later[:, -1] - later[:, 0])
    return np.asarray(1 + (later >= goals[:, None]).argmax(axis=1))


def drops(curve: np.ndarray) -> np.ndarray:
    """The accuracy at the end of a time step minus the lowest of the same time step; 0 at least.

    It is what a time step recovers, not what its drift cost: the time step before does not count.

    >>> drops(np.array([[0.0, 1.0], [0.25, 0.75], [0.75, 0.5]])).tolist()
    [0.5, 0.0]
    """
    later = curve[1:]
    return np.asarray(later[:, -1] - later.min(axis=1, initial=np.inf))


def end_accuracies(runs: Sequence[Run]) -> np.ndarray:
    """The test accuracy at the end of each time step, mean over clients, then over runs: [T].

    The thesis presents test accuracies alone, so the accuracies of the table are read as such.
    """
    curves = [drift_curves(run) for run in runs]
    ends = [nan_mean(found.on_own_concept[found.ends], axis=1) for found in curves]
    return np.asarray(np.mean(ends, axis=0))
