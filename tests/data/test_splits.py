from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.splits import draw_stratified, hold_out, split_train_valid

some_labels = st.lists(st.integers(0, 4), min_size=2, max_size=80).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(some_labels, st.integers(0, 2**32), st.data())
def test_a_stratified_draw_has_the_right_size_and_shares(
    labels: np.ndarray, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(labels)))
    rows = draw_stratified(labels, count, Key(seed))
    assert len(rows) == count
    assert (np.diff(rows) > 0).all()
    exact = count * np.bincount(labels, minlength=5) / len(labels)
    assert (np.abs(np.bincount(labels[rows], minlength=5) - exact) < 1).all()


@given(some_labels, st.integers(0, 2**32), st.data())
def test_a_public_set_and_the_rest_are_the_rows(
    labels: np.ndarray, seed: int, data: st.DataObject
) -> None:
    rows = np.sort(Key(seed).permutation(len(labels))[: data.draw(st.integers(2, len(labels)))])
    count = data.draw(st.integers(0, len(rows) - 1))
    public, rest = hold_out(rows, labels, count, Key(seed))
    assert len(public) == count
    assert np.array_equal(np.sort(np.concatenate([public, rest])), rows)


def test_the_papers_public_set_is_125_of_each_class() -> None:
    labels = np.repeat(np.arange(10), 5000)
    public, _ = hold_out(np.arange(50_000), labels, 1250, Key(0))
    assert np.bincount(labels[public]).tolist() == [125] * 10
    assert not np.array_equal(public, hold_out(np.arange(50_000), labels, 1250, Key(1))[0])


@pytest.mark.parametrize("count", [-1, 5, 6])
def test_a_public_set_that_leaves_nothing_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"public set of {count} examples .* from 5"):
        hold_out(np.arange(5), np.zeros(5, dtype=np.int64), count, Key(0))


def split_one(rows: np.ndarray, fraction: float, seed: int = 0) -> list[np.ndarray]:
    """The training and validation rows of a single client."""
    data = split_train_valid([rows], fraction, Key(seed))
    return [data.train.for_client(0), data.valid.for_client(0)]


@given(st.integers(1, 60), st.floats(0, 0.999), st.integers(0, 2**32))
def test_validation_and_training_rows_are_the_clients_rows(
    size: int, fraction: float, seed: int
) -> None:
    rows = 3 * np.arange(size) + 1
    train, valid = split_one(rows, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([train, valid])), rows)
    assert (np.diff(train) > 0).all()
    assert len(train) >= 1
    expected = min(size - 1, max(1, round(fraction * size))) if fraction > 0 and size > 1 else 0
    assert len(valid) == expected


def test_validation_sizes_of_the_papers() -> None:
    """90/10 of 500 is 450 + 50; 250 + 75 of 325 needs the fraction 75/325."""
    assert [len(part) for part in split_one(np.arange(500), 0.1)] == [450, 50]
    assert [len(part) for part in split_one(np.arange(325), 75 / 325)] == [250, 75]


def test_a_stratified_draw_gives_each_class_its_share() -> None:
    labels = np.repeat([0, 1], [90, 10])
    drawn = draw_stratified(labels, 10, Key(0))
    assert np.bincount(labels[drawn]).tolist() == [9, 1]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_impossible_validation_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="validation fraction"):
        split_one(np.arange(5), fraction)
