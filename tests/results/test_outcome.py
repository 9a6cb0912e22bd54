"""Did a run learn anything, and did it diverge? Lines of metrics.jsonl, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from remanence.results.outcome import (
    DivergenceDetector,
    describe_outcome,
    find_divergence,
    why_nothing_learned,
)


def line(round: int, **columns: Any) -> dict[str, Any]:
    return {
        "round": round,
        "split": "test",
        "accuracy": 0.5,
        "loss": 2.0,
        "replies": 3,
        "rejected": [],
        "abandoned": False,
        "learned": True,
        "unmoved": 0,
    } | columns


def rejected(*clients: int, code: str = "not-finite", reason: str = "NaN") -> list[dict[str, Any]]:
    return [{"client": client, "code": code, "reason": reason} for client in clients]


NO = {"abandoned": True, "learned": False}


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (NO | {"replies": 0}, "no client was online and sampled"),
        (NO | {"replies": 0, "no_response": [1, 2]}, "no client replied"),
        (NO | {"replies": 0, "late": 3}, "every reply was late"),
        (
            NO | {"replies": 0, "rejected": rejected(1, code="weight", reason="above the cap")},
            "every reply was rejected, most as weight: above the cap",
        ),
        (NO, "too few replies were valid"),
        (NO | {"problem": "the new model holds NaN"}, "the new model holds NaN"),
        ({"learned": False, "unmoved": 3}, "local training changed no client's model"),
        ({"learned": False, "unmoved": 2}, "the updates of the clients never changed the model"),
    ],
)
def test_why_nothing_was_learned(columns: dict[str, Any], why: str) -> None:
    lines = [line(1, **columns), line(2, **columns)]
    assert why_nothing_learned(lines) == why
    assert why_nothing_learned([*lines, line(3)]) == ""


def test_a_folder_without_the_column_has_learned_unless_all_rounds_are_abandoned() -> None:
    old = [{k: v for k, v in line(1).items() if k not in ("learned", "unmoved")}]
    assert why_nothing_learned(old) == ""
    assert why_nothing_learned([old[0] | {"abandoned": True}]) == "too few replies were valid"
    assert why_nothing_learned([]) == ""


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (
            {"rejected": rejected(4, 5), "replies": 1},
            "the models of 2 of 3 clients hold NaN or infinity",
        ),
        (
            {"problem": "the new model holds NaN or infinity"},
            "the new model holds NaN or infinity",
        ),
        ({"loss": None}, "the loss is not finite"),
        ({"loss": None, "accuracy": None}, ""),  # not evaluated
        ({"loss": 101.0}, "the loss is 101"),
        ({"loss": 99.0}, ""),
        ({"rejected": rejected(9)}, ""),  # an attacker
        ({"rejected": rejected(4, code="norm")}, ""),
    ],
)
def test_a_round_that_diverges(columns: dict[str, Any], found: str) -> None:
    """After a first round with a loss of 2, whose limit is max(100, 10 * 2)."""
    lines = [line(1), line(2, **columns)]
    assert find_divergence(lines, attackers=[9]) == ((2, found) if found else None)


def test_a_large_loss_in_the_first_round_may_be_that_of_unnormalized_data() -> None:
    """1000 in the first round, then at most ten times the lowest so far: 5000."""
    detector = DivergenceDetector()
    assert detector.check(line(1, loss=1000.0)) == ""
    assert detector.check(line(2, loss=500.0)) == ""
    assert detector.check(line(3, loss=4999.0)) == ""
    assert detector.check(line(4, loss=5001.0)) == "the loss is 5e+03"
    assert DivergenceDetector().check(line(1, loss=1.1e4)) == "the loss is 1.1e+04"


def test_the_sentences_of_a_run() -> None:
    lines = [line(n, **NO, replies=0, rejected=rejected(1, reason="NaN in it")) for n in (1, 2)]
    first, second = describe_outcome(lines, attackers=[])
    assert first.startswith("learned nothing in 2 rounds, its model is the untrained one: every")
    assert second.startswith("diverged in round 1: the models of 1 of 1 clients hold NaN")
    assert describe_outcome([line(1)], attackers=[]) == []
