"""The noise of a number over seeds, and whether the number differs from 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SeedNoise:
    """The mean of a number over seeds with its 95 % interval."""

    mean: float
    deviation: float | None  # sample standard deviation; None for one seed
    # 95 % interval of the mean, by Student's t; None for one seed
    interval: tuple[float, float] | None
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the mean differs from 0: "unknown" for one seed, "clear" if the interval excludes
        0, "likely" if only the mean is above twice the deviation, otherwise "noise".
        """
        if self.deviation is None or self.interval is None:
            return "unknown"
        if self.interval[0] > 0 or self.interval[1] < 0:
            return "clear"
        return "likely" if abs(self.mean) > 2 * self.deviation else "noise"

    def __abs__(self) -> SeedNoise:
        """The noise of the number with the sign of its mean removed, for sentences with "lost" or
        "gained".
        """
        if self.mean >= 0:
            return self
        return SeedNoise(
            -self.mean,
            self.deviation,
            (-self.interval[1], -self.interval[0]) if self.interval else None,
            self.seeds,
        )

    def as_dict(self) -> dict[str, Any]:
        """All values as JSON."""
        values = {
            "mean": self.mean,
            "deviation": self.deviation,
            "interval": list(self.interval) if self.interval else None,
        }
        return values | {"seeds": self.seeds, "verdict": self.verdict}


def seed_noise(values: Iterable[float], comparisons: int = 1) -> SeedNoise | None:
    """The mean over seeds with its 95 % interval; None if there is no number.

    Args:
        values: One number for each seed.
        comparisons: Number of intervals that should hold together with 95 % (Bonferroni).

    Three seeds at 0, 0.25 and 0.5: deviation 0.25, standard error 0.25 / sqrt 3, and t = 4.303 for
    two degrees of freedom, so the interval reaches below 0, and the mean is no more than twice the
    deviation:

    >>> noise = seed_noise([0.0, 0.25, 0.5])
    >>> noise.mean, noise.deviation, round(noise.interval[0], 3), noise.verdict
    (0.25, 0.25, -0.371, 'noise')

    Two seeds that agree well are too few for the interval (t = 12.7 for one degree of freedom):

    >>> seed_noise([0.2, 0.28]).verdict, seed_noise([0.2, 0.28, 0.24]).verdict
    ('likely', 'clear')
    """
    numbers = np.array([value for value in values if not math.isnan(value)])
    if not len(numbers):
        return None
    if len(numbers) == 1:
        return SeedNoise(float(numbers[0]), None, None, 1)
    from scipy.stats import t

    spread, mean = float(numbers.std(ddof=1)), float(numbers.mean())
    reach = (
        float(t.ppf(1 - 0.025 / comparisons, len(numbers) - 1)) * spread / math.sqrt(len(numbers))
    )
    return SeedNoise(mean, spread, (mean - reach, mean + reach), len(numbers))


def is_above(ours: Mapping[int, float], theirs: Mapping[int, float], comparisons: int = 1) -> bool:
    """Whether the seeds separate a number from a lower one: the 95 % interval of the paired
    differences of their common seeds is above 0. Fewer than two common seeds separate nothing.

    Args:
        ours: The number by seed.
        theirs: The other number by seed.
        comparisons: Number of such comparisons that should hold together with 95 %.
    """
    noise = seed_noise(
        (value - theirs[seed] for seed, value in ours.items() if seed in theirs), comparisons
    )
    return noise is not None and noise.interval is not None and noise.interval[0] > 1e-9
