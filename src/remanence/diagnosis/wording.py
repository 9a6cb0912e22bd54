"""The dataclass of a finding, and how noise is described in its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import Recommendation
from remanence.metrics.groups import clusters_of
from remanence.metrics.seed_noise import SeedNoise
from remanence.reports.table_columns import percent
from remanence.results.run import Run

MATTERS = 0.005  # loss of accuracy in a round; there are no recommendations against less


@dataclass(frozen=True)
class Finding:
    """One sentence with its evidence: numbers between 0 and 1, positive if lost."""

    topic: str
    sentence: str
    evidence: dict[str, Any]
    recommendations: tuple[Recommendation, ...] = ()


def describe_noise(noise: SeedNoise, subject: str = "") -> str:
    """Describe mean, deviation and interval, and whether the mean exceeds the noise."""
    if noise.deviation is None or noise.interval is None:
        return "One seed is not enough to distinguish this from noise: repeat with --seeds 3."
    verdict = {
        "clear": "more than the noise of the seeds",
        "likely": f"more than twice the deviation, though {noise.seeds} seeds are few",
        "noise": "within the noise of the seeds; more seeds may show a difference",
    }[noise.verdict]
    low, high = noise.interval
    numbers = (
        f"{percent(noise.mean, 2)} ± {percent(noise.deviation, 2)} points (95 % interval of"
        f" the mean {percent(low, 2)} to {percent(high, 2)})"
    )
    return f"{subject or f'Over {noise.seeds} seeds that'} is {numbers}: {verdict}."


def label_counts(run: Run) -> np.ndarray:
    """Label counts [clients, C]; empty if they were not recorded, or under drift, where they are
    those of the first time step.
    """
    counts = run.metadata.get("label_counts") if clusters_of(run) is None else None
    return np.array(counts or np.zeros((0, 0)), dtype=np.int64)
