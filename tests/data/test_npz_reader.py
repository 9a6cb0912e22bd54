from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import load_dataset

Y = np.arange(10) % 2


def read(path: Path, **options: object) -> Any:
    return load_dataset("npz", {"path": str(path), **options}, None)


def save(folder: Path, **arrays: Any) -> Path:
    path = folder / "mine.npz"
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("x", "kind", "shape"),
    [
        (np.zeros((10, 3)), "table", (3,)),
        (np.zeros((10, 3), dtype=np.uint8), "table", (3,)),
        (np.zeros((10, 3), dtype=np.int32), "tokens", (3,)),
        (np.zeros((10, 5, 6), dtype=np.uint8), "image", (1, 5, 6)),
        (np.zeros((10, 3, 5, 6), dtype=np.uint8), "image", (3, 5, 6)),
        (np.zeros((10, 5, 6, 3), dtype=np.uint8), "image", (3, 5, 6)),
        (np.zeros((10, 2, 5, 6), dtype=np.uint8), "image", (2, 5, 6)),
        (np.zeros((10, 5, 6), dtype=np.float32), "sequence", (5, 6)),
        (np.zeros((10, 1, 4, 5, 6), dtype=np.float32), "volume", (1, 4, 5, 6)),
        (np.zeros((10, 5, 6), dtype=np.int16), "image", (1, 5, 6)),
    ],
)
def test_the_kind_follows_from_the_array(
    tmp_path: Path, x: np.ndarray, kind: str, shape: tuple[int, ...]
) -> None:
    dataset = read(save(tmp_path, x=x, y=Y))
    assert (dataset.kind, dataset.shape) == (kind, shape)
    assert (len(dataset.train), len(dataset.test)) == (8, 2)


def test_a_kind_can_be_given(tmp_path: Path) -> None:
    assert (
        read(save(tmp_path, x=np.ones((10, 3), dtype=np.int64), y=Y), kind="table").train.x.dtype
        == np.float32
    )


def test_everything_in_the_file_is_used(tmp_path: Path) -> None:
    """Floats are kept: .5 is no byte divided by 255. Group names 30 and 7 sort to groups 1 and
    0.
    """
    path = save(
        tmp_path, x=np.full((4, 2, 2), 0.5), y=np.array([0, 1, 2, 0]), groups=np.array([30, 7, 30, 7]),
        x_test=np.ones((2, 2, 2)), y_test=np.array([2, 1]), groups_test=np.array([7, 30]), class_names=np.array(["a", "b", "c"]),
    )  # fmt: skip
    dataset = read(path, kind="image")
    assert dataset.classes == ("a", "b", "c")
    assert dataset.group_names == ("7", "30")
    assert dataset.train.x.dtype == dataset.test.x.dtype == np.float32
    assert (dataset.train.x == 0.5).all()
    assert (dataset.test.x == 1).all()
    assert dataset.train.groups.tolist() == [1, 0, 1, 0]
    assert dataset.test.groups.tolist() == [0, 1]
    assert dataset.test.y.tolist() == [2, 1]


def test_groups_may_be_words(tmp_path: Path) -> None:
    dataset = read(
        save(tmp_path, x=np.zeros((10, 2)), y=Y, groups=np.array(["north", "south"] * 5))
    )
    assert dataset.group_names == ("north", "south")
    assert sorted(set(dataset.train.groups.tolist())) == [0, 1]


def test_a_file_below_the_data_folder_is_found(tmp_path: Path) -> None:
    save(tmp_path, x=np.zeros((10, 2)), y=Y)
    assert len(load_dataset("npz", {"path": "mine.npz"}, tmp_path).train) == 8


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": np.zeros((10, 2))}, "arrays x and y"),
        (
            {"x": np.zeros((10, 2)), "y": Y, "x_test": np.zeros((1, 2))},
            "x_test and y_test together",
        ),
        ({"x": np.zeros((10, 2)), "y": Y[:9]}, "10 examples in x but 9 labels"),
        ({"x": np.zeros((10, 2)), "y": Y, "groups": Y[:9]}, "10 labels and 9 groups"),
        ({"x": np.zeros((10, 2)), "y": Y + 0.5}, "labels of type float64"),
        ({"x": np.zeros((10, 2)), "y": Y[:, None] * [1, 1]}, r"shape \(10, 2\)"),
        ({"x": np.zeros((10, 2)), "y": Y - 1}, "labels from -1 to 0"),
        ({"x": np.zeros((10, 2)), "y": Y * 10**9}, "labels from 0 to 1000000000"),
        ({"x": np.zeros((10, 2)), "y": Y * 0}, "1 class"),
        ({"x": np.zeros((0, 2)), "y": Y[:0]}, "from 0 example"),
        (
            {"x": np.zeros((0, 2)), "y": Y[:0], "x_test": np.zeros((10, 2)), "y_test": Y},
            "no training examples",
        ),
        ({"x": np.full((10, 2), np.nan), "y": Y}, "NaN"),
        ({"x": np.full((10, 2), 1e300), "y": Y}, "infinity"),
        ({"x": np.full((10, 2, 2), 2**25), "y": Y}, "which float32 does not hold exactly"),
        ({"x": np.zeros(10), "y": Y}, "image examples of shape"),
        (
            {"x": np.zeros((10, 2, 2, 2)), "y": Y, "x_test": Y.reshape(10, 1, 1, 1), "y_test": Y},
            "x of float64 and x_test of int64: give both the same type",
        ),
        ({"x": np.array([["a"]] * 10), "y": Y}, "examples of type <U1"),
        (
            {"x": np.array([[{}]] * 10), "y": Y},
            r"x\.npy.* of plain numbers or text, found type object",
        ),
        ({"x": np.zeros((10, 2)), "y": Y, "class_names": np.array(["only"])}, "1 class"),
    ],
)
def test_arrays_that_cannot_be_used_are_named(
    tmp_path: Path, arrays: dict[str, np.ndarray], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        read(save(tmp_path, **arrays))


def member(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


GOOD = {"x.npy": member(np.zeros((10, 2))), "y.npy": member(Y)}


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        (
            {**GOOD, "x.npy": GOOD["x.npy"][:-1]},
            r"\(10, 2\) float64 with 160 bytes, found 159 bytes",
        ),
        ({**GOOD, "x.npy": GOOD["x.npy"] + b"\0"}, "with 160 bytes, found 161 bytes"),
        ({**GOOD, "x.npy": b"nothing like it"}, "in numpy's format"),
        ({**GOOD, "x.npy": b""}, "in numpy's format"),
        ({**GOOD, "x.npy": b"\x93NUMPY\x03\x00" + b"\0" * 20}, r"version \(3, 0\)"),
        (
            {**GOOD, "x.npy": GOOD["x.npy"].replace(b"(10, 2)", b"(-5,-4)")},
            "bytes, found|in numpy's format",
        ),
        (
            {**GOOD, "readme.txt": b"hello"},
            r"plain \.npy arrays, stored or deflated, found the member 'readme\.txt'",
        ),
    ],
)
def test_members_that_lie_are_refused(
    tmp_path: Path, members: dict[str, bytes], complaint: str
) -> None:
    with pytest.raises(InputError, match=rf"mine\.npz is damaged .*{complaint}"):
        read(zipped(tmp_path / "mine.npz", members))


def test_archives_that_lie_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "mine.npz", GOOD, zipfile.ZIP_BZIP2)
    with pytest.raises(InputError, match="stored or deflated"):
        read(path)
    raw = zipped(path, GOOD, zipfile.ZIP_STORED).read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(InputError, match=r"a complete \.npz file"):
        read(path)
    # the data changed, the checksum did not
    path.write_bytes(raw.replace(b"\0" * 160, b"\0" * 159 + b"\1"))
    with pytest.raises(InputError, match=r"a complete \.npz file, found a broken one"):
        read(path)
    raw_deflated = zipped(path, GOOD).read_bytes()
    checksum = zipfile.ZipFile(path).getinfo("x.npy").CRC.to_bytes(4, "little")
    path.write_bytes(raw_deflated.replace(checksum, b"\1\2\3\4"))
    with pytest.raises(InputError, match=r"a complete \.npz file, found a broken one .*CRC"):
        read(path)
    size = len(GOOD["x.npy"])
    lying = raw.replace(
        size.to_bytes(4, "little") * 2, size.to_bytes(4, "little") + (1 << 30).to_bytes(4, "little")
    )
    path.write_bytes(lying)  # a few bytes that declare a gigabyte
    with pytest.raises(InputError, match=r"with a plausible size, found 'x\.npy'"):
        read(path)
    zipped(path, GOOD)
    monkeypatch.setenv("REMANENCE_MAX_BYTES", "100")
    with pytest.raises(InputError, match=r"takes .* and REMANENCE_MAX_BYTES allows 100 bytes"):
        read(path)


def test_npz_options_are_checked(tmp_path: Path) -> None:
    path = save(tmp_path, x=np.zeros((10, 2)), y=Y)
    with pytest.raises(InputError, match="no kind 'sound'"):
        read(path, kind="sound")
    with pytest.raises(InputError, match="test fraction"):
        read(path, test=0.0)
    with pytest.raises(InputError, match="whole numbers for the kind 'tokens'"):
        read(path, kind="tokens")
