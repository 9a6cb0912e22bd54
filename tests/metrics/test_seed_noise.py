from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.metrics.seed_noise import seed_noise

NUMBERS = st.lists(st.floats(-1, 1), min_size=2, max_size=6)


def test_one_seed_cannot_tell() -> None:
    noise = seed_noise([0.25])
    assert noise is not None
    assert (noise.mean, noise.deviation, noise.interval, noise.verdict) == (
        0.25,
        None,
        None,
        "unknown",
    )
    assert seed_noise([]) is None
    assert seed_noise([math.nan]) is None


def test_interval_by_hand() -> None:
    """0, 2 and 4 have mean 2 and deviation 2; the standard error is 2 / sqrt 3 and t for two
    degrees of freedom 4.3027.
    """
    noise = seed_noise([0.0, 2.0, 4.0, math.nan])
    assert noise is not None
    assert noise.interval == pytest.approx(
        (2 - 4.3027 * 2 / 3**0.5, 2 + 4.3027 * 2 / 3**0.5), abs=1e-3
    )
    assert (noise.seeds, noise.verdict) == (3, "noise")


@given(NUMBERS)
def test_sides_are_alike(values: list[float]) -> None:
    noise, other = seed_noise(values), seed_noise([-value for value in values])
    assert noise is not None
    assert other is not None
    assert noise.verdict == other.verdict
    assert abs(noise).mean == pytest.approx(abs(other).mean)
    assert abs(noise).mean >= 0


@given(st.floats(0.01, 1), st.integers(2, 6))
def test_seeds_that_all_agree_are_clear(value: float, seeds: int) -> None:
    noise = seed_noise([value] * seeds)
    assert noise is not None
    assert noise.verdict == "clear"
