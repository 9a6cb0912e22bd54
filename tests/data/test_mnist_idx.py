from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import load_dataset, mnist_idx


def packed(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write(
    folder: Path, prefix: str, parts: tuple[str, str], *, gz: bool, first_label: int = 0
) -> np.ndarray:
    """Six training and four test images of 5x4 whose bytes count up; returns the training
    images.
    """
    folder.mkdir(parents=True)
    for part, count in zip(parts, (6, 4), strict=True):
        images = np.arange(count * 20).reshape(count, 5, 4)
        labels = np.arange(count) % 3 + first_label
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            name, raw = f"{prefix}{part}-{what}-ubyte", packed(array)
            (folder / (name + ".gz" if gz else name)).write_bytes(gzip.compress(raw) if gz else raw)
    return np.arange(120, dtype=np.uint8).reshape(6, 5, 4)


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "fashion-mnist"),
        ("fashion_mnist", "FashionMNIST/raw"),
    ],
)
def test_mnist_and_fashion_mnist_are_read(tmp_path: Path, name: str, folder: str, gz: bool) -> None:
    images = write(tmp_path / folder, "", ("train", "t10k"), gz=gz)
    dataset = load_dataset(name, {}, tmp_path)
    assert np.array_equal(dataset.train.x, images[:, None])
    assert dataset.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(dataset.test) == 4
    assert dataset.train.x.flags.writeable  # torch warns about arrays it could not write to


@pytest.mark.parametrize("folder", ["emnist", "emnist/gzip", "EMNIST/raw"])
def test_emnist_is_turned_upright(tmp_path: Path, folder: str) -> None:
    images = write(tmp_path / folder, "emnist-balanced-", ("train", "test"), gz=True)
    dataset = load_dataset("emnist", {"split": "balanced"}, tmp_path)
    assert np.array_equal(dataset.train.x[:, 0], images.transpose(0, 2, 1))
    assert dataset.shape == (1, 4, 5)
    assert len(dataset.classes) == 47


def test_letters_are_numbered_from_one_in_the_file_and_from_zero_here(tmp_path: Path) -> None:
    write(tmp_path / "emnist", "emnist-letters-", ("train", "test"), gz=True, first_label=1)
    dataset = load_dataset("emnist", {"split": "letters"}, tmp_path)
    assert dataset.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.classes[0] == "a"
    assert len(dataset.classes) == 26


def test_the_splits_of_emnist_have_the_published_numbers_of_classes() -> None:
    assert {name: len(set(classes)) for name, classes in mnist_idx.EMNIST.items()} == {
        "byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10,
    }  # fmt: skip


IMAGES = packed(np.zeros((2, 3, 3)))


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "found nothing"),
        (b"\x1f\x8b\x08\x00", "starts with 00 00 08 03, found 1f 8b 08 00"),
        (packed(np.zeros(18)), "found 00 00 08 01"),
        (IMAGES[:10], "a header of 16 bytes, found 10 bytes"),
        (IMAGES[:-1], "18 bytes of data after the header, found 17"),
        (IMAGES + b"\0", "18 bytes of data after the header, found more"),
        (
            bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**31, 2**31, 2**31),
            "9903520314283042199192993792 bytes of data after the header, found a file of",
        ),
    ],
)
@pytest.mark.parametrize("gz", [False, True])
def test_damage_is_named(tmp_path: Path, raw: bytes, complaint: str, gz: bool) -> None:
    path = tmp_path / ("images.gz" if gz else "images")
    path.write_bytes(gzip.compress(raw) if gz else raw)
    with pytest.raises(InputError, match=f"{path} is damaged or not the right file: .*{complaint}"):
        mnist_idx.read_idx(path, 3)


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0\x08\x03 plain",
        gzip.compress(IMAGES)[:-9],
        gzip.compress(IMAGES)[:-8] + b"\0" * 8,
        b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\xff" * 30,
    ],
    ids=["not gzip", "cut", "wrong checksum", "garbage"],
)
def test_broken_gzip_files_are_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(raw)
    with pytest.raises(
        InputError, match=r"images\.gz is damaged .*a complete gzip file, found a broken one"
    ):
        mnist_idx.read_idx(path, 3)


def test_a_gzip_bomb_is_unpacked_no_further_than_its_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 MiB of zeros behind a header of 18 bytes: one byte more than declared is read,
    and the file refused.
    """
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(IMAGES + bytes(100 << 20), compresslevel=1))
    taken = []
    read = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        piece = read(self, size)
        taken.append(len(piece))
        return piece

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(InputError, match="found more"):
        mnist_idx.read_idx(path, 3)
    assert sum(taken) == 2 * 16 + 18 + 1  # the header is read twice


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    write(tmp_path / "mnist", "", ("train", "t10k"), gz=False)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(packed(np.zeros(3)))
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte .*expected 4 labels.*found 3"):
        load_dataset("mnist", {}, tmp_path)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "mnist", "", ("train", "t10k"), gz=False, first_label=8)
    with pytest.raises(InputError, match="labels from 8 to 10"):
        load_dataset("mnist", {}, tmp_path)
