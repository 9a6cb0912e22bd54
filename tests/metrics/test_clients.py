"""Spread, worst clients, and accuracy within and beyond a client's own labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics.small_ledger import evaluated, make_ledger, play_round

from remanence.metrics.clients import (
    accuracy_by_client,
    accuracy_spread,
    bottom_decile,
    in_local_accuracy,
    local_accuracies,
    out_local_accuracy,
    worst_client,
)

NAN = math.nan
accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_spread_is_the_deviation_of_all_clients() -> None:
    """Mean 1/2, squares 1/16, 1/16, 0, 0: variance 1/32."""
    assert accuracy_spread([0.25, 0.75, 0.5, 0.5, NAN]) == pytest.approx(math.sqrt(1 / 32))
    assert accuracy_spread([0.5]) == 0


@pytest.mark.parametrize(
    ("clients", "expected"), [(1, 0.0), (19, 0.0), (20, 0.5), (29, 0.5), (30, 1.0)]
)
def test_a_tenth_is_rounded_down_but_never_empty(clients: int, expected: float) -> None:
    """Client n has accuracy n: the mean of 0, of 0 and 1, of 0, 1 and 2."""
    assert bottom_decile([float(n) for n in reversed(range(clients))]) == expected


def test_nobody_has_no_numbers() -> None:
    for measure in (accuracy_spread, worst_client, bottom_decile):
        assert math.isnan(measure([]))
        assert math.isnan(measure([NAN, NAN]))


@given(accuracies, st.randoms())
def test_the_order_of_clients_does_not_matter(values: list[float], random: Any) -> None:
    mixed = list(values)
    random.shuffle(mixed)
    assert worst_client(mixed) == worst_client(values) == min(values)
    assert worst_client(values) <= bottom_decile(mixed) + 1e-12
    assert bottom_decile(values) <= sum(values) / len(values) + 1e-12
    assert accuracy_spread(mixed) == pytest.approx(accuracy_spread(values))


def test_within_and_beyond_a_clients_labels() -> None:
    """p = (1/2, 1/2, 0), A = (1, 1/2, 1/4). In: 3/4. Out: q = (1/4, 1/4, 1/2), 1/4 + 1/8 + 1/8
    = 1/2.
    """
    assert float(in_local_accuracy([1.0, 0.5, 0.25], [5, 5, 0])) == 0.75
    assert float(out_local_accuracy([1.0, 0.5, 0.25], [5, 5, 0])) == 0.5


def test_a_class_without_test_examples_is_left_out_of_both() -> None:
    """Class 0 is unknown. In: (1/2 * 1/2 + 0) / (1/2) = 1/2. Out: q = (., 1/4, 1/2): (1/8 +
    1/8) / (3/4) = 1/3.
    """
    assert float(in_local_accuracy([NAN, 0.5, 0.25], [5, 5, 0])) == 0.5
    assert float(out_local_accuracy([NAN, 0.5, 0.25], [5, 5, 0])) == pytest.approx(1 / 3)
    assert math.isnan(in_local_accuracy([NAN, 0.5], [5, 0]))  # the client's only class
    assert math.isnan(in_local_accuracy([1.0, 0.5], [0, 0]))  # no rows
    assert math.isnan(out_local_accuracy([1.0], [5]))  # nothing beyond


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=2, max_size=6).filter(
        lambda rows: any(count for _, count in rows)
    )
)
def test_p_and_q_together_are_the_plain_mean(rows: list[tuple[float, int]]) -> None:
    """p + (C - 1) q = 1 for every class, so in + (C - 1) out = sum of A; both lie between the
    worst and the best class.
    """
    per_class, counts = [value for value, _ in rows], [count for _, count in rows]
    inside, outside = (
        float(in_local_accuracy(per_class, counts)),
        float(out_local_accuracy(per_class, counts)),
    )
    assert inside + (len(rows) - 1) * outside == pytest.approx(sum(per_class))
    assert min(per_class) - 1e-12 <= min(inside, outside)
    assert max(inside, outside) <= max(per_class) + 1e-12


def test_every_recorded_local_model_with_its_own_clients_labels() -> None:
    """Client 2 has class 0 only and keeps it (1) while class 1 falls to 1/4; client 0 has class
    1 only, where its model has 3/4, and 0 on class 0.
    """
    ledger = make_ledger(
        *play_round([4, 4], [2, 2], {2: (0.5, [4, 1]), 0: (0.5, [0, 3])}, [2, 2], round=8)
    )
    found = local_accuracies(ledger, [[0, 9], [1, 1], [5, 0]])
    assert (found.round.tolist(), found.client.tolist()) == ([8, 8], [0, 2])
    assert found.in_local.tolist() == [0.75, 1.0]
    assert found.out_local.tolist() == [0.0, 0.25]


def test_each_client_on_its_own_rows() -> None:
    """Personal models where there are any; a model on another client's rows does not count, nor
    do the examples of all clients.
    """
    ledger = make_ledger(
        evaluated([2], [4], "personal", 1, owner=1, split="valid", round=5), evaluated([4], [4], "personal", 0, owner=0, split="valid", round=5),
        evaluated([0], [4], "personal", 0, owner=1, split="valid", round=5), evaluated([1], [4], "personal", 0, owner=0, split="valid", round=3),
        evaluated([3], [4], "merged", owner=0, split="valid", round=5), evaluated([1], [4], "merged", split="valid", round=5),
    )  # fmt: skip
    personal, first, merged = (
        accuracy_by_client(ledger),
        accuracy_by_client(ledger, round=3),
        accuracy_by_client(ledger, "merged"),
    )
    assert personal is not None
    assert first is not None
    assert merged is not None
    assert (personal.round, personal.clients.tolist(), personal.accuracy.tolist()) == (
        5,
        [0, 1],
        [1.0, 0.5],
    )
    assert (first.round, first.accuracy.tolist()) == (3, [0.25])
    assert (merged.clients.tolist(), merged.accuracy.tolist()) == ([0], [0.75])
    assert accuracy_by_client(ledger, round=4) is None
    assert accuracy_by_client(ledger, "local") is None


def test_many_models_at_once_equal_one_at_a_time() -> None:
    per_class, counts = np.array([[1.0, 0.5], [0.25, NAN]]), np.array([[3, 1], [1, 1]])
    for measure in (in_local_accuracy, out_local_accuracy):
        np.testing.assert_array_equal(
            measure(per_class, counts),
            [float(measure(a, b)) for a, b in zip(per_class, counts, strict=True)],
        )
