"""Two-sided geometric noise: integers z with probabilities proportional to exp(-epsilon |z|).

Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020,
algorithms 1 and 2. All arithmetic is on integers, and random bits come from the operating system:
noise that is computed from rounded numbers lacks some values, which gives single examples away.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np

LARGEST_NOISE = 1 << 53  # larger numbers are no exact integers in float64
RandomBelow = Callable[[int], int]  # n -> an integer of 0 .. n-1, each as likely


def draw_geometric(
    epsilon: Fraction, shape: tuple[int, ...], below: RandomBelow = secrets.randbelow
) -> np.ndarray:
    """Draw independent integers, as int64; larger ones than `LARGEST_NOISE` are cut to it.

    Args:
        epsilon: Above 0.
        shape: Of the result.
        below: Where random integers come from; another one for tests.
    """
    drawn = [_draw(epsilon, below) for _ in range(math.prod(shape))]
    limited = [min(max(noise, -LARGEST_NOISE), LARGEST_NOISE) for noise in drawn]
    return np.array(limited, dtype=np.int64).reshape(shape)


def _draw(epsilon: Fraction, below: RandomBelow) -> int:
    while True:
        remainder = below(epsilon.denominator)
        if not _flip(remainder, epsilon.denominator, below):
            continue
        whole = 0
        while _flip(1, 1, below):
            whole += 1
        size = (remainder + epsilon.denominator * whole) // epsilon.numerator
        negative = below(2) == 1
        if size or not negative:  # there is one 0, not two
            return -size if negative else size


def _flip(numerator: int, denominator: int, below: RandomBelow) -> bool:
    """True with probability exp(-numerator / denominator), for a fraction of at most 1."""
    count = 1
    while below(denominator * count) < numerator:
        count += 1
    return count % 2 == 1
