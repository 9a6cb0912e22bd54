"""Robust aggregators against Flower's strategies.

The largest difference that was measured is 2.2e-16, on points of size 1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aggregators.points import combine
from witnesses.flower_replies import aggregate
from witnesses.libraries import check, needs

from remanence.aggregators.robust import krum, median, multi_krum, trimmed_mean
from remanence.core.slots import Part

pytestmark = [pytest.mark.slow, needs("flwr"), pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-14


def largest_difference(ours: Part, strategy: object, replies: int) -> float:
    gaps = []
    for seed in range(20):
        points = np.random.default_rng(seed).normal(size=(replies, 7))
        points[0] += 3  # not all alike
        found = combine(ours, torch.from_numpy(points)).numpy()
        gaps.append(float(np.abs(found - aggregate(strategy, points, [1] * replies)).max()))
    return max(gaps)


@pytest.mark.parametrize("replies", [9, 12])
def test_median_and_trimmed_mean(replies: int) -> None:
    from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg

    check("median", largest_difference(median(), FedMedian(), replies), TOLERANCE)
    ours = trimmed_mean(fraction=0.25)
    theirs = FedTrimmedAvg(beta=0.25)
    check("trimmed mean", largest_difference(ours, theirs, replies), TOLERANCE)
    assert largest_difference(ours, FedMedian(), replies) > 1e-3  # they do differ


@pytest.mark.parametrize("byzantine", [0, 1, 3])
@pytest.mark.parametrize("replies", [9, 12])
def test_krum_and_multi_krum(byzantine: int, replies: int) -> None:
    from flwr.serverapp.strategy import Krum, MultiKrum

    ours = krum(byzantine=byzantine)
    theirs = Krum(num_malicious_nodes=byzantine)
    check("krum", largest_difference(ours, theirs, replies), TOLERANCE)
    several = multi_krum(byzantine=byzantine, keep=3)
    theirs = MultiKrum(num_malicious_nodes=byzantine, num_nodes_to_select=3)
    check("multi-krum", largest_difference(several, theirs, replies), TOLERANCE)
    assert largest_difference(ours, theirs, replies) > 1e-3
