"""What every finding needs: the numbers it stands on, and how they read in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import Recommendation
from remanence.metrics.groups import clusters_of
from remanence.metrics.seed_noise import SeedNoise
from remanence.report.table_columns import percent
from remanence.results.run import Run

MATTERS = 0.005  # half a point of accuracy a round: less is not worth a cure


@dataclass(frozen=True)
class Finding:
    """One sentence, and the numbers it stands on (shares between 0 and 1, positive = lost)."""

    topic: str
    sentence: str
    evidence: dict[str, Any]
    recommendations: tuple[Recommendation, ...] = ()


def describe_noise(noise: SeedNoise, subject: str = "") -> str:
    """Mean, deviation, and what they allow to say."""
    if noise.deviation is None or noise.interval is None:
        return "With one seed nobody can say whether that is more than noise."
    verdict = {
        "clear": "more than the noise of the seeds",
        "likely": f"more than twice the deviation, though {noise.seeds} seeds are few",
        "noise": "not told from noise; more seeds would say",
    }[noise.verdict]
    low, high = noise.interval
    numbers = (
        f"{percent(noise.mean, 2)} ± {percent(noise.deviation, 2)} points (95 % interval of"
        f" the mean {percent(low, 2)} to {percent(high, 2)})"
    )
    return f"{subject or f'Over {noise.seeds} seeds that'} is {numbers}: {verdict}."


def label_counts(run: Run) -> np.ndarray:
    """Label counts [clients, C], as far as they were written down; none where data drift and
    counts hold for the first time step alone.
    """
    counts = run.metadata.get("label_counts") if clusters_of(run) is None else None
    return np.array(counts or np.zeros((0, 0)), dtype=np.int64)
