"""Rounds to a target, curves in one number, accuracy against cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics.small_ledger import line, make_run

from remanence.core.errors import InputError
from remanence.metrics.convergence import (
    accuracy_per_bytes,
    accuracy_per_seconds,
    last,
    mean_of_last,
    rounds_to,
    rounds_to_fractions,
    time_averaged,
    top,
)

values = st.lists(st.floats(0, 1), min_size=1, max_size=20)


def test_the_first_time_counts_even_if_it_is_lost_again() -> None:
    assert rounds_to([5, 10, 15, 20], [0.25, 0.75, 0.5, 0.75], 0.75) == 10
    assert rounds_to([5, 10], [math.nan, 0.5], 0.5) == 10
    assert rounds_to([5], [0.25], 0.75) is None
    assert rounds_to([], [], 0.0) is None


@given(values, st.floats(0, 1))
def test_the_round_found_is_the_first_at_the_target(numbers: list[float], target: float) -> None:
    rounds = list(range(1, len(numbers) + 1))
    found = rounds_to(rounds, numbers, target)
    if found is None:
        assert max(numbers) < target
    else:
        assert numbers[found - 1] >= target
        assert all(number < target for number in numbers[: found - 1])


def test_flashbacks_table() -> None:
    """Best of all 0.8; target 0.95 * 0.8 = 0.76; 0.75 and 0.9 of it are 0.57 and 0.684. A
    method without records reaches nothing.
    """
    found = rounds_to_fractions(
        {
            "a": ([10, 20, 30], [0.6, 0.7, 0.8]),
            "b": ([10, 20, 30], [0.5, 0.58, 0.68]),
            "late": ([], []),
        }
    )
    assert found.target == pytest.approx(0.76)
    assert found.rounds == {"a": (10, 20, 30), "b": (20, None, None), "late": (None, None, None)}
    assert rounds_to_fractions({"a": ([1, 2], [0.5, 1.0])}, fractions=(0.5,), of=1.0).rounds == {
        "a": (1,)
    }
    unknown = {"a": ([1], [math.nan]), "b": ([1], [0.5])}
    assert rounds_to_fractions(unknown, fractions=(1.0,)).rounds == {"a": (None,), "b": (1,)}
    assert rounds_to_fractions({"late": ([], [])}).rounds == {"late": (None, None, None)}


def test_curves_in_one_number() -> None:
    assert (
        top([0.5, math.nan, 0.75]),
        last([0.5, 0.75]),
        mean_of_last([1.0, 0.5, 0.25], 2),
        mean_of_last([0.5], 100),
    ) == (
        0.75,
        0.75,
        0.375,
        0.5,
    )
    assert all(
        math.isnan(number)
        for number in (top([]), last([]), mean_of_last([], 3), time_averaged([], []))
    )
    with pytest.raises(InputError, match="the mean of the last 0 rounds is not defined"):
        mean_of_last([0.5], 0)


def test_a_value_stands_for_the_rounds_since_the_record_before() -> None:
    """Records every 4 rounds and at the end, round 10: (4 * 0 + 4 * 1/2 + 2 * 1) / 10. After a
    start at round 2 the first counts for 2 rounds.
    """
    assert time_averaged([4, 8, 10], [0.0, 0.5, 1.0]) == 0.4
    assert time_averaged([4, 8, 10], [0.0, 0.5, 1.0], start=2) == 0.5
    # round 8 has no value: the last record counts for rounds 5 to 10
    assert time_averaged([4, 8, 10], [0.0, math.nan, 1.0]) == 0.6


@given(values, st.integers(1, 7))
def test_with_equal_distances_it_is_the_plain_mean(numbers: list[float], every: int) -> None:
    rounds = [every * (place + 1) for place in range(len(numbers))]
    assert time_averaged(rounds, numbers) == pytest.approx(sum(numbers) / len(numbers))


def test_cost_adds_up_over_all_rounds_and_counts_once_a_round() -> None:
    """Rounds 1 and 2 send 30 bytes each (round 1 has two lines), round 2 was not evaluated,
    round 3 sends 5 without an answer.
    """
    sent = {"bytes_up": 10, "bytes_down": 20, "seconds": 0.5}
    run = make_run(
        [
            line(1, 0.25, **sent),
            line(1, 0.9, split="valid", **sent),
            line(2, **sent),
            line(3, 0.75, bytes_up=None, bytes_down=5, seconds=1.0),
        ]
    )
    cost = accuracy_per_bytes(run)
    assert (cost.round.tolist(), cost.cost.tolist(), cost.accuracy.tolist()) == (
        [1, 3],
        [30, 65],
        [0.25, 0.75],
    )
    assert accuracy_per_seconds(run).cost.tolist() == [0.5, 2.0]


def test_cost_of_the_model_that_counts() -> None:
    run = make_run(
        [line(1, 0.25, bytes_up=1), line(1, 0.5, model="personal", bytes_up=1)],
        evaluated="personal",
    )
    assert accuracy_per_bytes(run).accuracy.tolist() == [0.5]
    assert accuracy_per_bytes(make_run([])).round.shape == (0,)
