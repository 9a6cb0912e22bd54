from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from remanence.results.summary import summarize


def test_three_classes_by_hand() -> None:
    """Rows are true classes: 4 + 2 + 2 examples, of which 3 + 1 + 0 are right, so 4 of 8.

    Columns: class 0 was predicted 5 times, class 1 3 times, class 2 never.
    F1: 2*3/(5+4) = 2/3, 2*1/(3+2) = 2/5, 0/(0+2) = 0; their mean is 16/45.
    """
    summary = summarize(np.array([[3, 1, 0], [1, 1, 0], [1, 1, 0]]), 4.0)
    assert summary["accuracy"] == 4 / 8
    assert summary["per_class"] == [3 / 4, 1 / 2, 0.0]
    assert summary["loss"] == 0.5
    assert summary["macro_f1"] == pytest.approx(16 / 45, rel=1e-15)


def test_a_class_without_examples_has_no_accuracy_and_no_share_in_f1() -> None:
    """Class 1 is predicted once but never there: class 0 alone counts, with 2*1/(1+2)."""
    summary = summarize(np.array([[1, 1], [0, 0]]), 1.0)
    assert summary["per_class"] == [0.5, None]
    assert summary["macro_f1"] == pytest.approx(2 / 3, rel=1e-15)


def test_no_examples_at_all() -> None:
    summary = summarize(np.zeros((2, 2), dtype=int), 0.0)
    assert summary == {"accuracy": None, "per_class": [None, None], "loss": None, "macro_f1": None}


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_none(loss: float) -> None:
    assert summarize(np.eye(2, dtype=int), loss)["loss"] is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40),
    st.floats(0, 100),
)
def test_every_summary_is_plain_json_and_agrees_with_a_direct_count(
    pairs: list[tuple[int, int]], loss: float
) -> None:
    confusion = np.zeros((4, 4), dtype=np.int64)
    for truth, guess in pairs:
        confusion[truth, guess] += 1
    summary = summarize(confusion, loss)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    truth, guess = zip(*pairs, strict=True)
    assert summary["accuracy"] == sum(t == g for t, g in pairs) / len(pairs)
    there = sorted(set(truth))
    assert summary["macro_f1"] == pytest.approx(
        f1_score(truth, guess, labels=there, average="macro", zero_division=0), rel=1e-12
    )
    assert [c for c, share in enumerate(summary["per_class"]) if share is not None] == there
