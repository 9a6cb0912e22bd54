from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import dataset as dataset_module
from remanence.data.dataset import ArrayDataset, DatasetSplit, hold_out_test, validate


def table(rows: int = 6, features: int = 2) -> ArrayDataset:
    x = np.arange(rows * features, dtype=np.float32).reshape(rows, features)
    split = DatasetSplit(x, np.arange(rows) % 2)
    return ArrayDataset("mine", "table", ("a", "b"), split, split)


def test_a_sound_source_is_returned_as_it_is() -> None:
    dataset = table()
    assert validate(dataset) is dataset
    assert dataset.shape == (2,)
    assert len(dataset.train) == 6


def test_statistics_of_images_are_per_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channel 0 is 0 and 4 in equal numbers: mean 2, deviation 2. Channel 1 is always 7:
    deviation 0, given as 1.
    """
    # several chunks, the last one shorter
    monkeypatch.setattr(dataset_module, "CHUNK_VALUES", 10)
    x = np.zeros((6, 2, 2, 2), dtype=np.uint8)
    x[:3, 0] = 4
    x[:, 1] = 7
    split = DatasetSplit(x, np.arange(6) % 2)
    mean, std = ArrayDataset("mine", "image", ("a", "b"), split, split).statistics() or (None, None)
    assert np.array_equal(mean, [2.0, 7.0])
    assert np.array_equal(std, [2.0, 1.0])


def test_statistics_of_tables_survive_a_large_offset() -> None:
    """Values 16777214 and 16777216 are exact in float32: mean 16777215, deviation 1. A sum of
    squares in float32 would give nonsense.
    """
    x = np.tile(np.array([[16777214.0, 5.0], [16777216.0, 5.0]], dtype=np.float32), (500, 1))
    split = DatasetSplit(x, np.arange(1000) % 2)
    mean, std = ArrayDataset("mine", "table", ("a", "b"), split, split).statistics() or (None, None)
    assert np.array_equal(mean, [16777215.0, 5.0])
    assert np.array_equal(std, [1.0, 1.0])


def test_the_range_is_that_of_all_channels() -> None:
    """Bytes from 0 to 255 are shifted and divided by 127.5, as x / 255 would be by one half. Where
    all inputs are equal, they become 0.
    """
    x = np.zeros((6, 2, 2, 2), dtype=np.uint8)
    x[2, 1, 0, 1] = 255
    found = replace(GOOD_IMAGES, train=DatasetSplit(x, np.arange(6) % 2)).input_range()
    assert found is not None
    assert [part.tolist() for part in found] == [[127.5, 127.5]] * 2
    equal = replace(GOOD_IMAGES, train=DatasetSplit(x[:1] + 3, np.arange(1))).input_range()
    assert equal is not None
    assert [part.tolist() for part in equal] == [[3.0, 3.0], [1.0, 1.0]]


def test_tokens_have_no_statistics() -> None:
    split = DatasetSplit(np.zeros((4, 3), dtype=np.int64), np.arange(4) % 2)
    tokens = validate(ArrayDataset("mine", "tokens", ("a", "b"), split, split))
    assert tokens.statistics() is tokens.input_range() is None


GOOD = table()
IMAGES = DatasetSplit(np.zeros((6, 2, 2, 2), dtype=np.uint8), np.arange(6) % 2)
GOOD_IMAGES = ArrayDataset("mine", "image", ("a", "b"), IMAGES, IMAGES)
NAN = np.array([[0, np.nan]], dtype=np.float32)
ONE = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        (replace(GOOD, kind="sound"), "kind 'sound'"),
        (replace(GOOD, classes=("a",)), "1 class"),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x[:5], GOOD.train.y)),
            "5 training examples but 6 labels",
        ),
        (replace(GOOD, test=DatasetSplit(GOOD.test.x[:0], GOOD.test.y[:0])), "no test examples"),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x, GOOD.train.y + 1)),
            "training labels from 1 to 2",
        ),
        (
            replace(GOOD, test=DatasetSplit(GOOD.test.x, GOOD.test.y - 1)),
            "test labels from -1 to 0",
        ),
        (replace(GOOD, test=DatasetSplit(NAN, ONE)), "NaN or infinity"),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x.astype(np.float64), GOOD.train.y)),
            "type float64",
        ),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x, GOOD.train.y.astype(np.int32))),
            "labels of type int32",
        ),
        (
            replace(GOOD, test=DatasetSplit(np.zeros((1, 3), dtype=np.float32), ONE)),
            r"shape \(2,\) and test examples of shape \(3,\)",
        ),
        (replace(GOOD, kind="image"), "type float32"),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x, GOOD.train.y, GOOD.train.y)),
            "groups from 0 to 1 and 0 group names",
        ),
        (
            replace(GOOD, train=DatasetSplit(GOOD.train.x, GOOD.train.y, ONE), group_names=("g",)),
            r"groups of type int64 and shape \(1,\)",
        ),
        (
            replace(GOOD, kind="tokens", train=DatasetSplit(np.full((1, 1), -1), ONE)),
            "negative token",
        ),
    ],
)
def test_errors_name_the_problem(dataset: ArrayDataset, complaint: str) -> None:
    with pytest.raises(InputError, match=f"dataset 'mine' has .*{complaint}"):
        validate(dataset)


@given(st.lists(st.integers(0, 3), min_size=5, max_size=60), st.floats(0.05, 0.95), st.booleans())
def test_a_held_out_test_set_is_stratified_and_complete(
    labels: list[int], fraction: float, grouped: bool
) -> None:
    y = np.array(labels, dtype=np.int64)
    if len(np.unique(y)) == len(y):
        y[1] = y[0]
    split = DatasetSplit(
        np.arange(len(y), dtype=np.float32)[:, None], y, np.arange(len(y)) % 2 if grouped else None
    )
    train, test = hold_out_test(split, fraction)
    assert sorted([*train.x[:, 0], *test.x[:, 0]]) == list(range(len(y)))
    assert np.array_equal(y[train.x[:, 0].astype(int)], train.y)
    assert set(test.y) <= set(train.y)
    if grouped:
        assert test.groups is not None
        assert np.array_equal(test.groups, test.x[:, 0].astype(int) % 2)


def test_a_test_set_is_held_out_although_only_one_class_has_two_examples() -> None:
    """The one example that is drawn is the only one of its class and goes back to training, so the
    first example of the largest class is held out instead.
    """
    y = np.array([0, 0, 1, 2, 3])
    split = DatasetSplit(np.arange(5, dtype=np.float32)[:, None], y, np.arange(5) % 2)
    train, test = hold_out_test(split, 0.25)
    assert (train.y.tolist(), test.y.tolist()) == ([0, 1, 2, 3], [0])


def test_held_out_shares_are_exact_per_class_and_group() -> None:
    """4 groups x 7 classes x 40 examples at 0.2: 8 of each."""
    groups, y = (
        axis.reshape(-1) for axis in np.meshgrid(np.repeat(np.arange(4), 40), np.arange(7))
    )
    _, test = hold_out_test(DatasetSplit(np.zeros((len(y), 1), dtype=np.float32), y, groups), 0.2)
    assert test.groups is not None
    assert np.array_equal(np.bincount(test.groups * 7 + test.y), [8] * 28)


def test_the_test_set_depends_on_its_key_alone() -> None:
    split = DatasetSplit(np.arange(100, dtype=np.float32)[:, None], np.arange(100) % 2)
    first, again, other = (hold_out_test(split, 0.2, *key)[1].x for key in ((), (), (Key(1),)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_test_sets_that_cannot_be_held_out_are_refused() -> None:
    two = DatasetSplit(np.zeros((2, 1), dtype=np.float32), np.arange(2))
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match="test fraction"):
            hold_out_test(two, fraction)
    with pytest.raises(InputError, match="every class has a single example"):
        hold_out_test(two, 0.5)
    with pytest.raises(InputError, match="from 1 example"):
        hold_out_test(two.select(np.array([0])), 0.5)
