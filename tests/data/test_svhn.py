"""SVHN's .mat files and CINIC-10's folders, made small by the test in the publishers' formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from remanence.core.errors import InputError
from remanence.data import cinic, mat_reader, svhn_mat
from remanence.data.cifar import CIFAR10


def write_mat(path: Path, count: int, **changes: Any) -> np.ndarray:
    """X as MATLAB keeps it, [row, column, channel, example]; y counts 1 to 10, and 10 is the
    digit 0.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.arange(32 * 32 * 3 * count, dtype=np.uint32).reshape(32, 32, 3, count).astype(np.uint8)
    y = (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)
    savemat(path, {"X": x, "y": y} | changes, do_compression=True)
    return x


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_mat(tmp_path / "svhn" / "train_32x32.mat", 12)
    write_mat(tmp_path / "svhn" / "test_32x32.mat", 10)
    return tmp_path


def test_pictures_stand_upright_and_ten_means_zero(root: Path) -> None:
    x = write_mat(root / "svhn" / "train_32x32.mat", 12)
    dataset = svhn_mat.svhn(root)
    assert dataset.shape == (3, 32, 32)
    assert dataset.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert dataset.train.x[7, 2, 31, 5] == x[31, 5, 2, 7]
    assert len(dataset.test) == 10


def test_the_third_file_is_added_when_asked_for(root: Path) -> None:
    with pytest.raises(InputError, match=r"extra_32x32\.mat"):
        svhn_mat.svhn(root, extra=True)
    write_mat(root / "svhn" / "extra_32x32.mat", 5)
    assert len(svhn_mat.svhn(root, extra=True).train) == 17


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"X": np.zeros((32, 32, 3, 7), np.uint8)}, r"X \(32, 32, 3, 7\) and y \(12, 1\)"),
        ({"X": np.zeros((32, 32, 3, 12))}, "X of another type than bytes"),
        ({"X": np.zeros((28, 28, 12), np.uint8)}, "expected the arrays X"),
        ({"y": np.zeros((12, 1), np.uint8)}, "labels from 0 to 0"),
        ({"y": np.full((12, 1), 11, np.uint8)}, "labels from 11 to 11"),
    ],
)
def test_other_shapes_and_labels_are_refused(
    root: Path, changes: dict[str, Any], says: str
) -> None:
    write_mat(root / "svhn" / "train_32x32.mat", 12, **changes)
    with pytest.raises(InputError, match=says):
        svhn_mat.svhn(root)


def test_files_that_are_no_mat_files_are_refused(root: Path) -> None:
    path = root / "svhn" / "train_32x32.mat"
    whole = path.read_bytes()
    for content in (b"", b"not matlab " * 50, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged or not the right file"):
            svhn_mat.svhn(root)
    savemat(path, {"other": np.zeros(3)})
    with pytest.raises(InputError, match="found the arrays of other names or none"):
        svhn_mat.svhn(root)


def test_a_header_that_declares_too_much_is_refused_before_anything_is_unpacked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 12 images are 36,864 bytes, well packed in the file, and are transposed into a copy
    monkeypatch.setenv("REMANENCE_MAX_BYTES", "60000")
    monkeypatch.setattr(mat_reader, "_unpack", None)
    with pytest.raises(InputError, match=r"train_32x32\.mat takes .* REMANENCE_MAX_BYTES"):
        svhn_mat.read_mat(root / "svhn" / "train_32x32.mat")


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="remanence data fetch svhn"):
        svhn_mat.svhn(tmp_path)
    with pytest.raises(InputError, match="remanence data fetch cinic10"):
        cinic.cinic10(tmp_path)


def test_cinic_is_read_by_part_and_class(tmp_path: Path) -> None:
    for grey, part in enumerate(("train", "valid", "test")):
        for name in CIFAR10:
            folder = tmp_path / "CINIC-10" / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), (10 * grey, 0, 0)).save(folder / "a.png")
    alone, merged = cinic.cinic10(tmp_path), cinic.cinic10(tmp_path, merge=True)
    assert alone.train.y.tolist() == list(range(10))
    assert merged.train.y.tolist() == [*range(10), *range(10)]
    assert (merged.train.x[:, 0, 0, 0].tolist(), set(alone.test.x[:, 0].flatten().tolist())) == (
        [0] * 10 + [10] * 10,
        {20},
    )
    (tmp_path / "CINIC-10" / "test" / "dog" / "a.png").unlink()
    with pytest.raises(InputError, match=r"test/dog: unpack CINIC-10\.tar\.gz again"):
        cinic.cinic10(tmp_path)
