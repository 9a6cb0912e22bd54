from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.expressions import instantiate, parse_call
from remanence.optimizers import LR_SCHEDULES, LrSchedule

TEXTS = ["constant", "exponential", "step(every=3)", "cosine", "cosine(final=0.1)", "warmup"]


def make(text: str) -> LrSchedule:
    return instantiate(parse_call(text), LR_SCHEDULES, "schedule")


@pytest.mark.parametrize(
    ("text", "rounds", "factors"),
    [
        ("constant", 4, [1, 1, 1, 1]),
        ("exponential(decay=0.5)", 4, [1, 0.5, 0.25, 0.125]),
        ("exponential(decay=1)", 3, [1, 1, 1]),
        ("step(every=2)", 5, [1, 1, 0.1, 0.1, 0.01]),
        ("step(every=1, factor=0.5)", 3, [1, 0.5, 0.25]),
        # half a cosine over four steps: (1 + cos(0, 45, 90, 135, 180 degrees)) / 2
        ("cosine", 5, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ("cosine(final=0.2)", 3, [1, 0.6, 0.2]),
        ("cosine(final=1)", 3, [1, 1, 1]),
        ("warmup(rounds=4)", 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("warmup(rounds=1)", 2, [1, 1]),
    ],
)
def test_factors_by_hand(text: str, rounds: int, factors: list[float]) -> None:
    schedule = make(text)
    assert [schedule(round, rounds) for round in range(1, rounds + 1)] == pytest.approx(
        factors, rel=1e-14, abs=1e-15
    )


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_of_one_round(text: str) -> None:
    assert make(text)(1, 1) == (0.2 if text == "warmup" else 1.0)


@given(st.sampled_from(TEXTS), st.integers(1, 300), st.data())
def test_factors_lie_between_0_and_1_and_only_warmup_rises(
    text: str, rounds: int, data: st.DataObject
) -> None:
    schedule, round = make(text), data.draw(st.integers(1, rounds))
    factor = schedule(round, rounds)
    assert 0 <= factor <= 1
    if round > 1:
        before = schedule(round - 1, rounds)
        assert factor >= before if text == "warmup" else factor <= before + 1e-15


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("exponential(decay=0)", "exponential: decay must be a number above 0, at most 1, not 0.0"),
        ("exponential(decay=1.1)", "exponential: decay"),
        ("step", r"schedule 'step' needs every: write step\(every=...\)"),
        ("step(every=0)", "step: every must be a number of at least 1, not 0"),
        ("step(every=2, factor=0)", "step: factor"),
        ("step(every=2, factor=2)", "step: factor"),
        ("cosine(final=-0.1)", "cosine: final must be a number from 0 to 1, not -0.1"),
        ("cosine(final=1.1)", "cosine: final"),
        ("warmup(rounds=0)", "warmup: rounds must be a number of at least 1, not 0"),
        ("cosin", "unknown schedule 'cosin': did you mean cosine"),
    ],
)
def test_impossible_schedules_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make(text)


def test_every_schedule_of_the_table_is_tried() -> None:
    assert {parse_call(text).name for text in TEXTS} == set(LR_SCHEDULES)
    with pytest.raises(InputError, match="decay"):
        LR_SCHEDULES["exponential"](decay=float("nan"))
