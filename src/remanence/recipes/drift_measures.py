"""The measures of HAST: as section 3.5 of the thesis describes them, with the deviation over seeds,
and as its printed numbers were computed, with that over time steps (`metrics.drift_as_printed`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from remanence.metrics.drift import summarize_drift
from remanence.metrics.drift_as_printed import (
    drops,
    end_accuracies,
    rounds_to_gain,
    validation_curve,
)
from remanence.recipes.cell_evidence import CellEvidence, RecipeMeasure, by_seed
from remanence.recipes.recipe import CellNumber
from remanence.results.run import Run


def performance() -> RecipeMeasure:
    """Accuracy at the end of each time step (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).performance)


def convergence() -> RecipeMeasure:
    """Rounds to 90 % of the accuracy gain of a time step (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).convergence.mean)


def robustness() -> RecipeMeasure:
    """Largest accuracy drop right after a drift (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).robustness)


def performance_as_printed() -> RecipeMeasure:
    """Accuracy at the end of each time step, with its deviation over time steps (HAST, table
    A.8).
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        return summarize_steps(end_accuracies(evidence.runs)) if evidence.runs else CellNumber()

    return measure


def convergence_as_printed() -> RecipeMeasure:
    """Rounds to 90% of a time step's gain, of the mean over clients and seeds (HAST, table A.8)."""
    return by_time_step(rounds_to_gain)


def robustness_as_printed() -> RecipeMeasure:
    """The end of a time step minus its lowest accuracy, of the mean over clients and seeds (HAST,
    table A.8).
    """
    return by_time_step(drops)


def by_time_step(measure: Callable[[np.ndarray], np.ndarray]) -> RecipeMeasure:
    """Turn a measure of a curve [T, R] into its mean and deviation over time steps."""

    def over_steps(evidence: CellEvidence) -> CellNumber:
        curve = validation_curve(evidence.runs)
        return CellNumber() if curve is None else summarize_steps(measure(curve))

    return over_steps


def summarize_steps(values: np.ndarray) -> CellNumber:
    """Mean and deviation over time steps. The printed deviations are those of all time steps, not
    of a sample of them.

    >>> summarize_steps(np.array([1.0, 3.0]))
    CellNumber(value=2.0, deviation=1.0, text='')
    """
    return CellNumber(float(values.mean()), float(values.std())) if len(values) else CellNumber()


def cluster_share_range() -> RecipeMeasure:
    """The largest difference between two time steps in a cluster's share of the clients."""

    def measure(run: Run) -> float:
        clusters = np.asarray(run.metadata["clusters"])  # [T, K]
        inside = clusters[:, :, None] == np.arange(clusters.max() + 1)
        return float(np.ptp(inside.mean(axis=1), axis=0).max())

    return by_seed(measure)
