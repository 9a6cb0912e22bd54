"""Robust aggregators against ByzFL.

The largest differences that were measured: 2.2e-16, and 3.3e-12 for the geometric median, where
both iterate. ByzFL's Krum sums the squared distances to n - f - 1 others, and not to n - f - 2 as
its paper and ours do: the same replies with f lower by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from aggregators.points import combine
from witnesses.libraries import check, load, needs

from remanence.aggregators.robust import geometric_median, krum, median, multi_krum, trimmed_mean
from remanence.core.slots import Part

pytestmark = [pytest.mark.slow, needs("byzfl"), pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-14
REPLIES = 12


def largest_difference(ours: Part, theirs: Callable[[np.ndarray], np.ndarray]) -> float:
    gaps = []
    for seed in range(20):
        points = np.random.default_rng(seed).normal(size=(REPLIES, 7))
        points[0] += 3
        found = combine(ours, torch.from_numpy(points)).numpy()
        gaps.append(float(np.abs(found - theirs(points)).max()))
    return max(gaps)


def test_median_and_trimmed_mean() -> None:
    byzfl = load("byzfl")

    check("median", largest_difference(median(), byzfl.Median()), TOLERANCE)
    trimmed = largest_difference(trimmed_mean(fraction=0.25), byzfl.TrMean(f=3))
    check("trimmed mean", trimmed, TOLERANCE)
    assert largest_difference(trimmed_mean(fraction=0.25), byzfl.TrMean(f=2)) > 1e-3


@pytest.mark.parametrize("byzantine", [0, 1, 2])
def test_krum_and_multi_krum(byzantine: int) -> None:
    byzfl = load("byzfl")

    theirs = byzfl.Krum(f=byzantine + 1)
    check("krum", largest_difference(krum(byzantine=byzantine), theirs), TOLERANCE)
    # ByzFL averages n - f replies; with its f one higher that is one more than ours allows
    best = multi_krum(byzantine=byzantine, keep=REPLIES - byzantine - 2)
    mean = byzfl.MultiKrum(f=byzantine + 1)
    assert largest_difference(best, mean) > 1e-3


def test_geometric_median() -> None:
    byzfl = load("byzfl")

    ours = geometric_median(tolerance=1e-10, iterations=2000, weighted=False)
    theirs = byzfl.GeometricMedian(nu=1e-12, T=2000)
    check("geometric median", largest_difference(ours, theirs), 1e-8)
    assert largest_difference(ours, byzfl.Median()) > 1e-3
