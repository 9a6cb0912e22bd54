from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import DATASETS, describe_dataset, load_dataset

NEEDS_FILES = [
    "cifar10",
    "cifar100",
    "emnist",
    "fashion_mnist",
    "femnist",
    "mnist",
    "mnist_by_writer",
    "pacs",
]
GETS = {
    "cifar10": r"cifar-10-binary\.tar\.gz",
    "cifar100": r"cifar-100-binary\.tar\.gz",
    "emnist": r"gzip\.zip",
    "fashion_mnist": "Fashion-MNIST",
    "femnist": "LEAF",
    "mnist": "MNIST",
    "mnist_by_writer": "QMNIST",
    "pacs": "PACS",
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real_data" not in request.fixturenames:
        monkeypatch.delenv("REMANENCE_DATA", raising=False)


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_takes_the_data_folder_and_keyword_options(name: str) -> None:
    first, *options = inspect.signature(DATASETS[name]).parameters.values()
    assert DATASETS[name].__name__ == name
    assert first.name == "root"
    assert all(
        option.kind is option.KEYWORD_ONLY and option.default is not option.empty
        for option in options
    )
    assert DATASETS[name].__doc__


@pytest.mark.parametrize("name", NEEDS_FILES)
def test_missing_data_are_named_with_the_folder_and_the_cure(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"dataset '{name}' was not found: searched {tmp_path} for"
        rf" .*{GETS[name]}.*--data-dir or REMANENCE_DATA",
    ):
        load_dataset(name, {}, tmp_path)
    with pytest.raises(
        InputError,
        match=rf"dataset '{name}' .*no data folder is set: .*{GETS[name]}.*--data-dir or"
        r" REMANENCE_DATA",
    ):
        load_dataset(name, {}, None)
    with pytest.raises(
        InputError, match=rf"dataset '{name}' .*the data folder .*nowhere does not exist"
    ):
        load_dataset(name, {}, tmp_path / "nowhere")


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(InputError, match="unknown dataset 'cifar11': did you mean cifar10"):
        load_dataset("cifar11", {}, None)
    with pytest.raises(
        InputError, match="dataset 'synthetic' has no option 'sample': did you mean samples"
    ):
        load_dataset("synthetic", {"sample": 3}, None)
    with pytest.raises(InputError, match="samples must be a whole number"):
        load_dataset("synthetic", {"samples": "many"}, None)


def test_the_environment_names_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 2)), y=np.arange(10) % 2)
    monkeypatch.setenv("REMANENCE_DATA", str(tmp_path))
    assert len(load_dataset("npz", {"path": "mine.npz"}, None).train) == 8


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read everything"
)
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 2)), y=np.arange(10) % 2)
    (tmp_path / "mine.npz").chmod(0)
    with pytest.raises(InputError, match=r"dataset 'npz' cannot be read .*mine\.npz"):
        load_dataset("npz", {"path": "mine.npz"}, tmp_path)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").mkdir()
    with pytest.raises(InputError, match=r"dataset 'npz' cannot be read .*mine\.npz"):
        load_dataset("npz", {"path": "mine.npz"}, tmp_path)


def test_a_check_says_what_is_there(tmp_path: Path) -> None:
    """20 rows of class 0 and 5 of class 1 in groups of 10 and 15; a fifth is held out in each."""
    x, y, groups = np.zeros((25, 3)), np.repeat([0, 1], [20, 5]), np.repeat([4, 9], [10, 15])
    np.savez(
        tmp_path / "mine.npz", x=x, y=y, groups=groups, class_names=np.array(["common", "rare"])
    )
    dataset = load_dataset("npz", {"path": "mine.npz"}, tmp_path)
    assert describe_dataset(dataset).splitlines() == [
        "npz: Arrays of mine.npz.",
        "  examples  20 for training, 5 for testing",
        "  one is    table 3, float32",
        "  classes   2 (common, rare), 4 to 16 training examples each",
        "  groups    2 (4, 9), 8 to 12 training examples each",
    ]


def test_real_cifar10(real_data: Callable[[str], Path]) -> None:
    """Published: 5000 + 1000 of each class; the channel means of the training set are .4914
    .4822 .4465 of 255.
    """
    dataset = load_dataset("cifar10", {}, real_data("cifar-10-batches-bin"))
    assert np.bincount(dataset.train.y).tolist() == [5000] * 10
    assert np.bincount(dataset.test.y).tolist() == [1000] * 10
    mean, std = dataset.statistics() or (None, None)
    assert mean / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert std / 255 == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-4)
    assert dataset.train.y[:4].tolist() == [6, 9, 9, 4]


def test_real_mnist(real_data: Callable[[str], Path]) -> None:
    """Published: 60,000 + 10,000; mean .1307 and deviation .3081 of 255; the training labels
    begin 5 0 4 1 9.
    """
    dataset = load_dataset("mnist", {}, real_data("mnist"))
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    mean, std = dataset.statistics() or (None, None)
    assert mean / 255 == pytest.approx([0.1307], abs=1e-4)
    assert std / 255 == pytest.approx([0.3081], abs=1e-4)
    assert dataset.train.y[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_emnist_stands_upright(real_data: Callable[[str], Path]) -> None:
    """A capital L has its foot at the bottom right: more ink there than at the top right. Lying
    on its side it would be the other way round.
    """
    dataset = load_dataset("emnist", {"split": "byclass"}, real_data("emnist"))
    assert len(dataset.classes) == 62
    mean = dataset.train.x[dataset.train.y == dataset.classes.index("L"), 0].mean(
        axis=0
    )  # [28, 28]
    assert mean[20:, 16:].mean() > 2 * mean[:8, 16:].mean()


@pytest.mark.slow
def test_real_mnist_by_writer(real_data: Callable[[str], Path]) -> None:
    dataset = load_dataset("mnist_by_writer", {}, real_data("leaf-mnist-by-writer"))
    assert len(dataset.train) + len(dataset.test) == 60_000
    assert len(dataset.group_names) == 539
    assert dataset.train.groups is not None
    assert len(np.unique(dataset.train.groups)) == 539


@pytest.mark.slow
def test_real_pacs(real_data: Callable[[str], Path]) -> None:
    pytest.importorskip("PIL", reason="images in folders need Pillow")
    dataset = load_dataset("pacs", {}, real_data("PACS"))
    assert dataset.shape == (3, 227, 227)
    assert dataset.group_names == ("art_painting", "cartoon", "photo", "sketch")
    assert dataset.test.groups is not None
    assert np.bincount(dataset.test.groups * 7 + dataset.test.y, minlength=28).min() >= 1
