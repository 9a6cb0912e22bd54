"""Slow clients: speeds and times as drawn, who is waited for, and late answers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.experiment.system import parse_deadline, parse_speed, response_times
from remanence.rounds.stragglers import (
    merge_stale,
    on_time_mask,
    rebase_stale,
    round_duration,
    rounds_late,
    staleness_weight,
)


def test_speeds_are_as_asked() -> None:
    """Of 4000 logarithms with deviation .5: mean within 5 * .5 / sqrt(4000) = .04, deviation
    within 5 * .5 / sqrt(8000) = .028.
    """
    seconds = parse_speed("lognormal(sigma=0.5)")(4000, Key(1))
    assert abs(np.log(seconds).mean()) < 0.04
    assert abs(np.log(seconds).std() - 0.5) < 0.028
    two = parse_speed("classes(slow=0.3, factor=5)")(10, Key(1))
    assert sorted(two.tolist()) == [1] * 7 + [5] * 3
    assert parse_speed("equal(seconds=2)")(3, Key(1)).tolist() == [2, 2, 2]
    assert two.tolist() == parse_speed("classes(slow=0.3, factor=5)")(10, Key(1)).tolist()
    assert len({tuple(parse_speed("classes")(10, Key(seed)).tolist()) for seed in range(8)}) > 4


def test_an_answer_takes_its_steps_and_belongs_to_its_client() -> None:
    """Without jitter: 3 steps of 2 seconds, 5 of 1. With it, a client's time does not depend on
    who else is asked.
    """
    seconds = np.array([9.0, 2.0, 9.0, 1.0])
    plain = response_times(np.array([1, 3]), np.array([3, 5]), seconds, Key(0), jitter=0)
    assert plain.tolist() == [6, 5]
    both = response_times(np.array([1, 3]), np.array([3, 5]), seconds, Key(0))
    alone = response_times(np.array([3]), np.array([5]), seconds, Key(0))
    assert both[1] == alone[0] != 5
    assert response_times(np.array([3]), np.array([5]), seconds, Key(1))[0] != alone[0]
    many = response_times(np.arange(4000), np.ones(4000), np.ones(4000), Key(0), jitter=0.1)
    assert abs(np.log(many).std() - 0.1) < 5 * 0.1 / math.sqrt(8000)


times_lists = st.lists(st.floats(0.01, 1000), min_size=0, max_size=30).map(np.array)


@given(
    times=times_lists,
    wanted=st.integers(1, 40),
    deadline=st.one_of(st.floats(0.01, 1000), st.just(math.inf)),
)
def test_the_first_in_time_and_nobody_else(times: np.ndarray, wanted: int, deadline: float) -> None:
    used = on_time_mask(times, wanted, deadline)
    assert used.sum() == min(wanted, int((times <= deadline).sum()))
    assert not used.any() or times[used].max() <= deadline
    left = ~used & (times <= deadline)
    assert not left.any() or times[used].max() <= times[left].min()
    length = round_duration(times, used, wanted, deadline)
    assert math.isfinite(length)
    assert length <= deadline
    assert not used.any() or length >= times[used].max()


def test_of_equal_times_the_first_in_order() -> None:
    assert on_time_mask(np.array([2.0, 1.0, 1.0, 1.0]), 2, math.inf).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_how_long_a_round_takes() -> None:
    """Times 3, 1, 9. The second of two wanted comes at 3. Three wanted by 5: the round waits
    until 5. Three without a deadline: until 9.
    """
    times = np.array([3.0, 1.0, 9.0])
    for wanted, deadline, length in (
        (2, math.inf, 3),
        (3, 5.0, 5),
        (3, math.inf, 9),
        (1, 5.0, 1),
        (9, math.inf, 9),
        (2, 0.5, 0.5),
        (9, 20.0, 9),
    ):
        assert (
            round_duration(times, on_time_mask(times, wanted, deadline), wanted, deadline) == length
        ), (wanted, deadline)
    assert round_duration(np.empty(0), np.empty(0, dtype=bool), 3, 5.0) == 0


def test_deadlines() -> None:
    """Of ten, the share .8 is the 8th; of three, ceil(2.4) = the 3rd; 0.7 * 10 must not become
    the 8th by rounding.
    """
    times = np.arange(10.0, 0.0, -1.0)
    assert parse_deadline("quantile")(times) == 8
    assert parse_deadline("quantile(share=0.7)")(times) == 7
    assert parse_deadline("quantile(share=0.8)")(times[:3]) == 10
    assert parse_deadline("quantile(share=1)")(times) == 10
    assert parse_deadline("quantile")(np.empty(0)) == 0
    assert parse_deadline("none")(times) == math.inf
    assert parse_deadline("2.5")(times) == parse_deadline("after(seconds=2.5)")(times) == 2.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: parse_speed("lognormal(sigma=-1)"),
            "speed lognormal: sigma must be a number of at least 0",
        ),
        (
            lambda: parse_speed("classes(slow=2)"),
            "speed classes: slow must be a number from 0 to 1",
        ),
        (
            lambda: parse_speed("classes(factor=0.5)"),
            "speed classes: factor must be a number of at least 1",
        ),
        (lambda: parse_speed("equal(seconds=0)"), "speed equal: seconds"),
        (lambda: parse_speed("logormal"), "unknown speed 'logormal': did you mean lognormal"),
        (lambda: parse_deadline("0"), "deadline after: seconds must be a number above 0, not 0"),
        (lambda: parse_deadline("nan"), "deadline after: seconds"),
        (lambda: parse_deadline("inf"), "deadline after: seconds"),
        (
            lambda: parse_deadline("quantile(share=0)"),
            "deadline quantile: share must be a number above 0 and at most 1",
        ),
        (
            lambda: parse_deadline("after"),
            r"deadline 'after' needs seconds: write after\(seconds=...\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]


def test_how_many_rounds_late() -> None:
    assert rounds_late(np.array([0.1, 4.0, 4.1, 8.0, 8.1]), 4.0).tolist() == [0, 0, 1, 1, 2]
    assert rounds_late(np.array([3.0]), math.inf).tolist() == [0]
    assert rounds_late(np.array([3.0]), 0.0).tolist() == [0]


def test_staleness() -> None:
    """1 / (1 + s)^a: a = 1 gives 1, 1/2, 1/3."""
    assert [staleness_weight(age, 1.0) for age in (0, 1, 2)] == pytest.approx(
        [1, 1 / 2, 1 / 3], abs=1e-15
    )
    assert staleness_weight(5, 0.0) == 1
    with pytest.raises(ValueError, match="cannot be -1 rounds old"):
        staleness_weight(-1, 1.0)


def make(clients: list[int], values: list[float], rounds: list[int]) -> Reply:
    k = len(clients)
    weight = torch.full((k,), 6.0, dtype=torch.float64)
    return Reply(
        torch.tensor(clients),
        torch.tensor(rounds),
        {"w": torch.tensor(values)},
        {},
        {},
        weight,
        {},
        torch.zeros(k),
    )


def test_a_late_answer_by_hand() -> None:
    """It began at 10 in round 3 and came to 12; today, in round 5, the model is 7: it says 9.
    Frozen names stay away.
    """
    began = ModelState({"w": torch.tensor(10.0), "frozen": torch.tensor(0.0)}, {})
    now = ModelState({"w": torch.tensor(7.0), "frozen": torch.tensor(0.0)}, {})
    found = rebase_stale(make([4], [12.0], [3]), began, now, round=5)
    assert (found.params["w"].tolist(), found.round.tolist()) == ([9.0], [5])
    assert found.weight.tolist() == [6.0]
    assert set(found.params) == {"w"}


def test_late_answers_join_the_others() -> None:
    """In the order of clients."""
    both = merge_stale(make([2, 4], [1.0, 2.0], [5, 5]), make([3], [9.0], [5]))
    assert both is not None
    assert (both.client.tolist(), both.params["w"].tolist()) == ([2, 3, 4], [1.0, 9.0, 2.0])
    some = make([4], [8.0], [5])
    assert merge_stale(None, some) is some
    assert merge_stale(some, None) is some
    assert merge_stale(None, None) is None
