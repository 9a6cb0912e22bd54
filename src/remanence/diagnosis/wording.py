"""What every finding needs: the numbers it stands on, and how they read in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import Recommendation
from remanence.metrics.groups import clusters_of
from remanence.metrics.seed_noise import SeedNoise
from remanence.results.run import Run

MATTERS = 0.005  # half a point of accuracy a round: less is not worth a cure
NAMED = 3  # classes and clients named in a sentence


@dataclass(frozen=True)
class Finding:
    """One sentence, and the numbers it stands on (shares between 0 and 1, positive = lost)."""

    topic: str
    sentence: str
    evidence: dict[str, Any]
    recommendations: tuple[Recommendation, ...] = ()


def describe_change(loss: float) -> str:
    return (
        "changes nothing"
        if abs(loss) < 0.0005
        else f"{'loses' if loss > 0 else 'gains'} {points(abs(loss))}"
    )


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
        f"{points(noise.mean, 2)} ± {points(noise.deviation, 2)} points (95 % interval of"
        f" the mean {points(low, 2)} to {points(high, 2)})"
    )
    return f"{subject or f'Over {noise.seeds} seeds that'} is {numbers}: {verdict}."


def points(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}"


def join(parts: Iterable[str]) -> str:
    """
    >>> join(["a", "b", "c"])
    'a, b and c'
    """
    texts = list(parts)
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1] if texts else ""]))


def largest(values: np.ndarray, names: Sequence[str]) -> list[tuple[str, float]]:
    """The names with the largest positive values."""
    order = [
        place
        for place in np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
        if values[place] > 0
    ]
    return [(names[place], float(values[place])) for place in order[:NAMED]]


def label_counts(run: Run) -> np.ndarray:
    """Label counts [clients, C], as far as they were written down; none where data drift and
    counts hold for the first time step alone.
    """
    counts = run.metadata.get("label_counts") if clusters_of(run) is None else None
    return np.array(counts or np.zeros((0, 0)), dtype=np.int64)
