"""Accuracy under drift.

All measures start from `DriftCurves`: each client's accuracy on every concept (cluster) at every
recorded round. A client's "own" concept is the one it is in at that time. Performance, convergence
and robustness are those of HAST (Klefbom and Toftås, 2023), section 3.5. The thesis calls them
misleading alone, so there are further measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.convergence import time_averaged
from remanence.metrics.drift_curves import DriftCurves, drift_curves

if TYPE_CHECKING:
    from remanence.results.run import Run


@dataclass(frozen=True)
class StepRounds:
    """Rounds from the start of a time step to an event; NaN where it does not apply or did not
    happen.
    """

    rounds: np.ndarray  # [S, K]
    mean: float  # over clients and time steps that have a number
    without: int  # number of clients and time steps that have none


@dataclass(frozen=True)
class DriftSummary:
    """The measures of a run under drift; NaN where the run does not have them."""

    performance: float
    convergence: StepRounds
    robustness: float
    time_averaged: float
    recovery: StepRounds
    worst_client: float
    concept_forgetting: float


def performance(curves: DriftCurves) -> float:
    """Accuracy at the end of each time step, averaged over clients, then over time steps (section
    3.5). Two time steps of one client with two records each:

    >>> performance(_example([0.25, 0.5, 0.0, 1.0]))
    0.75
    """
    return float(nan_mean(nan_mean(curves.on_own_concept[curves.ends], axis=1)))


def convergence_rounds(curves: DriftCurves, fraction: float = 0.9) -> StepRounds:
    """Rounds from the start of a time step to 90% of its gain, for each client and time step
    (section 3.5).

    The gain is the accuracy at the end minus that at the first record of the time step (our
    interpretation: the thesis counts the recovered drop). A client without a gain has no number and
    counts in `without`. Time step 0 gains 0.25, at its second record; time step 1 loses:

    >>> found = convergence_rounds(_example([0.25, 0.5, 1.0, 0.75]))
    >>> found.rounds[:, 0], found.mean, found.without
    (array([ 2., nan]), 2.0, 1)
    """

    def goals(place: int, rows: np.ndarray) -> np.ndarray:
        gain = rows[-1] - rows[0]
        return np.where(gain > 0, rows[-1] - (1 - fraction) * gain, np.nan)

    return _rounds_until(curves, curves.steps, goals)


def robustness(curves: DriftCurves) -> float:
    """The final accuracy of the previous time step minus the lowest of the new one, averaged over
    clients and time steps (section 3.5). Positive: dropped.

    >>> robustness(_example([0.25, 0.75, 0.5, 1.0]))
    0.25
    """
    drops = [
        curves.on_own_concept[curves.ends[place]]
        - _worst(curves.on_own_concept[curves.step == step])
        for place, step in enumerate(curves.steps[1:])
    ]
    return float(nan_mean(np.array(drops))) if drops else float("nan")


def time_averaged_accuracy(curves: DriftCurves) -> float:
    """The mean over all rounds of the mean over clients: a drop counts as long as it lasts.

    >>> time_averaged_accuracy(_example([0.25, 0.75, 0.0, 1.0]))
    0.5
    """
    return time_averaged(curves.round.tolist(), nan_mean(curves.on_own_concept, axis=1).tolist())


def recovery_rounds(curves: DriftCurves) -> StepRounds:
    """Rounds after a drift until a client reaches its accuracy before the drift again; NaN, counted
    in `without`, if it does not in that time step.

    The accuracy before the drift is that of the last record of the previous time step. The first
    record at or above it counts, so the interval of recording limits the precision.

    >>> recovery_rounds(_example([0.25, 0.75, 0.5, 1.0])).rounds
    array([[2.]])
    """
    return _rounds_until(
        curves, curves.steps[1:], lambda place, rows: curves.on_own_concept[curves.ends[place]]
    )


def recovery_of_mean(curves: DriftCurves) -> list[int | None]:
    """`recovery_rounds` of the mean over clients: rounds for each drift, None if the mean does not
    recover in that time step.

    >>> recovery_of_mean(_example([0.25, 0.75, 0.5, 0.5]))
    [None]
    """
    mean = nan_mean(curves.on_own_concept, axis=1)[:, None, None]  # as one client in one concept
    alone = DriftCurves(
        curves.round,
        curves.step,
        mean,
        np.zeros((len(curves.clusters), 1), np.int64),
        curves.rounds_per_step,
    )
    return [
        None if np.isnan(rounds) else int(rounds) for rounds in recovery_rounds(alone).rounds[:, 0]
    ]


def worst_client_curve(curves: DriftCurves) -> np.ndarray:
    """The lowest accuracy of any client on its own concept, over recorded rounds: [R]."""
    return _worst(curves.on_own_concept.T)


def cluster_curves(curves: DriftCurves) -> np.ndarray:
    """The mean over the clients that are in each cluster at that time: [R, M]; NaN while a cluster
    is empty.
    """
    # [R, K, M]
    inside = curves.clusters[curves.step][:, :, None] == np.arange(curves.by_concept.shape[2])
    return nan_mean(np.where(inside, curves.on_own_concept[:, :, None], np.nan), axis=1)


def concept_forgetting(curves: DriftCurves) -> np.ndarray:
    """Forgetting of previous concepts: accuracy at the last record in the concept minus the current
    one, mean over the concepts that a client has left: [R, K].

    Positive: forgotten. NaN while a client has left no concept. A client leaves concept 0 at 0.75
    and later has 0.5 and 0.25 there:

    >>> accuracy = np.array([[[0.75, 0.0]], [[0.5, 0.5]], [[0.25, 1.0]]])
    >>> clusters = np.array([[0], [1]])
    >>> moved = DriftCurves(np.array([1, 2, 3]), np.array([0, 1, 1]), accuracy, clusters, 2)
    >>> concept_forgetting(moved)[:, 0]
    array([ nan, 0.25, 0.5 ])
    """
    lost = np.full(curves.by_concept.shape, np.nan)
    _, clients, concepts = curves.by_concept.shape
    then = np.full((clients, concepts), np.nan)  # accuracy at the last record inside the concept
    for place, step in enumerate(curves.step):
        inside = curves.clusters[step][:, None] == np.arange(concepts)  # [K, M]
        now = curves.by_concept[place]
        lost[place] = np.where(inside, np.nan, then - now)
        then = np.where(inside, now, then)
    return nan_mean(lost, axis=2)


def summarize_drift(run: Run) -> DriftSummary:
    """All measures of a run under drift. The worst client is that at the end of each time step,
    averaged over time steps as performance is.
    """
    curves = drift_curves(run)
    return DriftSummary(
        performance(curves),
        convergence_rounds(curves),
        robustness(curves),
        time_averaged_accuracy(curves),
        recovery_rounds(curves),
        float(nan_mean(worst_client_curve(curves)[curves.ends])),
        float(nan_mean(concept_forgetting(curves)[-1])),
    )


def _rounds_until(curves: DriftCurves, steps: list[int], goal_of: Any) -> StepRounds:
    """Rounds from the start of each time step to the first record at or above a goal.

    Args:
        curves: The curves.
        steps: The time steps.
        goal_of: Returns the goals [K] from the index of a time step and its accuracies [r, K].
    """
    found = np.full((len(steps), curves.on_own_concept.shape[1]), np.nan)
    for place, step in enumerate(steps):
        here = curves.step == step
        # [r, K]; a comparison with NaN is False
        reached = curves.on_own_concept[here] >= goal_of(place, curves.on_own_concept[here])
        since = curves.round[here] - step * curves.rounds_per_step
        found[place] = np.where(reached.any(axis=0), since[reached.argmax(axis=0)], np.nan)
    return StepRounds(found, float(nan_mean(found)), int(np.isnan(found).sum()))


def _worst(rows: np.ndarray) -> np.ndarray:
    """The minimum over the first axis without NaN; NaN if there is nothing else."""
    least = np.where(np.isnan(rows), np.inf, rows).min(axis=0, initial=np.inf)
    return np.where(np.isposinf(least), np.nan, least)


def _example(accuracy: list[float]) -> DriftCurves:
    """One client, two time steps of two rounds: for the examples above."""
    return DriftCurves(
        np.arange(1, 5),
        np.array([0, 0, 1, 1]),
        np.array(accuracy).reshape(4, 1, 1),
        np.zeros((2, 1), np.int64),
        rounds_per_step=2,
    )
