"""Datasets of Hugging Face, against the real library where it is installed (extra `hub`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.data import from_dataset, load_dataset
from remanence.experiment.data_setup import load_data, tabulate_partition

Y = [row % 3 for row in range(30)]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets")


def vectors(library: Any) -> Any:
    return library.Dataset.from_dict(
        {
            "x": np.random.default_rng(0).normal(size=(30, 4)).tolist(),
            "label": [["cat", "dog", "owl"][y] for y in Y],
            "site": [f"ward-{row % 2}" for row in range(30)],
        }
    )


def test_a_folder_of_save_to_disk_is_read(library: Any, tmp_path: Path) -> None:
    data = vectors(library)
    data.save_to_disk(tmp_path / "saved")
    config = parse_experiment({}, {"data.name": str(tmp_path / "saved")})
    source = load_data(config)
    assert (source.kind, source.shape, source.classes) == ("table", (4,), ("cat", "dog", "owl"))
    assert tabulate_partition(config).names == ["ward-0", "ward-1"]
    assert np.array_equal(source.train.x, from_dataset(data).train.x)


def test_splits_class_names_and_images_are_read(library: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = [image.new("RGB", (6, 5), (row, 0, 0)) for row in range(30)]
    names = library.ClassLabel(names=["cat", "dog", "owl"])
    features = library.Features({"image": library.Image(), "label": names})
    part = library.Dataset.from_dict({"image": pictures, "label": Y}, features=features)
    both = library.DatasetDict({"train": part, "test": part.select(range(9))})
    both.save_to_disk(tmp_path / "saved")
    for source in (
        load_dataset("hub", {"path": str(tmp_path / "saved")}, None),
        from_dataset(both),
    ):
        assert (source.kind, source.shape) == ("image", (3, 5, 6))
        assert source.classes == ("cat", "dog", "owl")
        assert (len(source.train), len(source.test)) == (30, 9)
        assert source.train.x[:, 0, 0, 0].tolist() == list(range(30))


def test_datasets_that_cannot_be_used_are_named(library: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no column 'lable': did you mean label\?"):
        from_dataset(vectors(library), label="lable")
    ragged = library.Dataset.from_dict({"input_ids": [[1], [1, 2]], "label": [0, 1]})
    with pytest.raises(InputError, match="does not hold numbers or images of one size"):
        from_dataset(ragged)
    vectors(library).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("no JSON")
    with pytest.raises(InputError, match="is damaged or not the right file"):
        load_dataset("hub", {"path": str(tmp_path / "saved")}, None)


def test_the_extra_is_named_where_the_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(InputError, match=r"pip install 'remanence-fl\[hub\]'"):
        load_data(parse_experiment({}, {"data.name": str(tmp_path)}))
