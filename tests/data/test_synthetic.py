from __future__ import annotations

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import load_dataset


def nearest_mean_accuracy(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> float:
    train_x, test_x = (x.reshape(len(x), -1).astype(np.float64) for x in (train_x, test_x))
    means = np.stack([train_x[train_y == label].mean(axis=0) for label in range(train_y.max() + 1)])
    distances = ((test_x[:, None] - means) ** 2).sum(axis=2)
    return float((distances.argmin(axis=1) == test_y).mean())


def test_a_table_has_balanced_classes_that_can_be_told_apart() -> None:
    dataset = load_dataset("synthetic", {"samples": 1003, "classes": 4, "features": 8}, None)
    assert (len(dataset.train), len(dataset.test)) == (802, 201)
    for split in (dataset.train, dataset.test):
        counts = np.bincount(split.y)
        assert counts.max() - counts.min() <= 1
    assert dataset.train.x.dtype == np.float32
    assert (
        nearest_mean_accuracy(dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y)
        > 0.8
    )


def test_the_spread_is_the_noise_around_the_prototypes() -> None:
    """Without spread all examples of a class are its prototype; with spread 3 the deviation
    inside a class is 3.
    """
    still = load_dataset("synthetic", {"samples": 100, "classes": 2, "spread": 0.0}, None)
    assert len(np.unique(still.train.x, axis=0)) == 2
    wide = load_dataset("synthetic", {"samples": 4000, "classes": 2, "spread": 3.0}, None)
    assert wide.train.x[wide.train.y == 1].std(axis=0).mean() == pytest.approx(3.0, rel=0.02)
    offset = wide.train.x[wide.train.y == 1].mean(axis=0) - still.train.x[still.train.y == 1][0]
    assert np.abs(offset).max() < 0.4  # the same prototypes: 3 / sqrt(1600) = .075, five deviations


def test_a_shape_gives_images() -> None:
    """128 + 32 z with z of variance 1 + spread^2 = 2: mean 128, deviation 32 sqrt(2) = 45.3, a
    little less for the cut at 0 and 255.
    """
    dataset = load_dataset("synthetic", {"samples": 600, "classes": 3, "shape": "3x8x9"}, None)
    assert dataset.kind == "image"
    assert dataset.shape == (3, 8, 9)
    assert dataset.train.x.mean() == pytest.approx(128, abs=4)
    assert dataset.train.x.std() == pytest.approx(45, abs=4)
    assert (
        nearest_mean_accuracy(dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y)
        == 1.0
    )


def test_tokens_show_their_class_in_their_frequencies() -> None:
    dataset = load_dataset(
        "tokens", {"samples": 600, "classes": 3, "length": 50, "vocabulary": 20}, None
    )
    assert dataset.kind == "tokens"
    assert dataset.shape == (50,)
    assert dataset.train.x.min() == 0
    assert dataset.train.x.max() == 19
    counts = [
        np.stack([np.bincount(row, minlength=20) for row in split.x])
        for split in (dataset.train, dataset.test)
    ]
    assert nearest_mean_accuracy(counts[0], dataset.train.y, counts[1], dataset.test.y) > 0.95


@pytest.mark.parametrize("name", ["synthetic", "tokens"])
def test_the_seed_makes_the_data(name: str) -> None:
    first, again, other = (
        load_dataset(name, {"samples": 100, "classes": 2, "seed": seed}, None) for seed in (0, 0, 1)
    )
    assert np.array_equal(first.train.x, again.train.x)
    assert np.array_equal(first.test.y, again.test.y)
    assert not np.array_equal(first.train.x, other.train.x)
    assert not np.array_equal(first.train.x[: len(first.test)], first.test.x)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("synthetic", {"classes": 1}, "1 classes"),
        ("synthetic", {"samples": 20}, "each of 10 classes in both parts"),
        ("synthetic", {"samples": -5}, "each of 10 classes in both parts"),
        ("synthetic", {"test": 0.0}, "test fraction of 0.0"),
        ("synthetic", {"features": 0}, "0 features"),
        ("synthetic", {"spread": -1.0}, "spread of -1.0"),
        ("synthetic", {"spread": float("nan")}, "spread of nan"),
        ("synthetic", {"shape": "32x32"}, "shape '32x32'"),
        ("synthetic", {"shape": "0x4x4"}, "shape '0x4x4'"),
        ("synthetic", {"samples": 10**15, "features": 10**6}, "takes .* of memory"),
        ("tokens", {"vocabulary": 1}, "vocabulary of 1"),
        ("tokens", {"length": 0}, "length 0"),
    ],
)
def test_impossible_data_are_refused(name: str, options: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=f"dataset '{name}' .*{complaint}"):
        load_dataset(name, options, None)


def test_digits_come_with_scikit_learn() -> None:
    dataset = load_dataset("digits", {}, None)
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert dataset.shape == (1, 8, 8)
    assert dataset.train.x.max() == 16
    counts = np.bincount(np.concatenate([dataset.train.y, dataset.test.y]))
    assert np.abs(np.bincount(dataset.test.y) - 0.2 * counts).max() < 1
    assert (
        nearest_mean_accuracy(dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y)
        > 0.85
    )
