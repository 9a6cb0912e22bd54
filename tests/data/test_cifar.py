from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.data import cifar, load_dataset
from remanence.data.restricted_pickle import read_plain_pickle

BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
SMALL = 3  # images a file, in place of 10,000


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "BATCH", SMALL)


def records(count: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Images in which every byte tells where it belongs, and labels."""
    x = (np.arange(count * cifar.PIXELS) + start).astype(np.uint8).reshape(count, cifar.PIXELS)
    return x, (np.arange(count) + start) % 10


def write_binary10(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for start, name in enumerate([*BATCHES, "test_batch"]):
        x, y = records(SMALL, start)
        (folder / f"{name}.bin").write_bytes(
            np.concatenate([y[:, None].astype(np.uint8), x], axis=1).tobytes()
        )


def write_python10(root: Path, protocol: int = 2) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for start, name in enumerate([*BATCHES, "test_batch"]):
        x, y = records(SMALL, start)
        names = [f"{row}.png" for row in range(SMALL)]
        content = {"batch_label": name, "labels": y.tolist(), "data": x, "filenames": names}
        (folder / name).write_bytes(
            as_python2(content) if protocol == 2 else pickle.dumps(content, protocol=protocol)
        )


def as_python2(content: dict[str, object]) -> bytes:
    """What Python 2 and numpy 1 wrote: protocol 2, byte strings, `numpy.core`, an array as raw
    bytes. Python 3 cannot write this itself.
    """

    def text(value: bytes) -> bytes:
        return (
            b"U" + bytes([len(value)]) + value
            if len(value) < 256
            else b"T" + len(value).to_bytes(4, "little") + value
        )

    def number(value: int) -> bytes:
        return (
            b"K" + bytes([value])
            if 0 <= value < 256
            else b"J" + value.to_bytes(4, "little", signed=True)
        )

    def array(value: np.ndarray) -> bytes:
        made = (
            b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85"
            + text(b"b")
            + b"\x87R"
        )
        dtype = (
            b"cnumpy\ndtype\nq\x03"
            + text(b"u1")
            + b"K\x00K\x01\x87R(K\x03"
            + text(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        return (
            made
            + b"(K\x01"
            + number(value.shape[0])
            + number(value.shape[1])
            + b"\x86"
            + dtype
            + b"\x89"
            + text(value.tobytes())
            + b"tb"
        )

    body = b""
    for name, value in content.items():
        body += text(name.encode())
        if isinstance(value, np.ndarray):
            body += array(value)
        elif isinstance(value, list):
            body += (
                b"]("
                + b"".join(
                    number(item) if isinstance(item, int) else text(str(item).encode())
                    for item in value
                )
                + b"e"
            )
        else:
            body += text(str(value).encode())
    return b"\x80\x02}(" + body + b"u."


def assert_is_what_was_written(root: Path) -> None:
    dataset = load_dataset("cifar10", {}, root)
    for split, starts in ((dataset.train, range(5)), (dataset.test, [5])):
        parts = [records(SMALL, start) for start in starts]
        assert np.array_equal(split.x, np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32))
        assert np.array_equal(split.y, np.concatenate([y for _, y in parts]))
    assert dataset.train.x.dtype == np.uint8
    assert dataset.classes[3] == "cat"


def test_the_binary_version_is_read(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    assert_is_what_was_written(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_python_version_is_read_however_it_was_pickled(tmp_path: Path, protocol: int) -> None:
    write_python10(tmp_path, protocol)
    assert_is_what_was_written(tmp_path)


def test_numpy_1_names_are_read_too(tmp_path: Path) -> None:
    write_python10(tmp_path, 4)
    for path in (tmp_path / "cifar-10-batches-py").iterdir():
        raw = path.read_bytes()
        new = b"\x8c\x16numpy._core.multiarray"  # a short string: its length, then the text
        assert new in raw
        body = raw[11:].replace(new, b"\x8c\x15numpy.core.multiarray")
        path.write_bytes(raw[:3] + len(body).to_bytes(8, "little") + body)
    assert_is_what_was_written(tmp_path)


@pytest.mark.parametrize(("labels", "column"), [("fine", 1), ("coarse", 0)])
@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar100_has_fine_and_coarse_labels(
    tmp_path: Path, labels: str, column: int, version: str
) -> None:
    folder = tmp_path / f"cifar-100-{version}"
    folder.mkdir()
    for part, count in (("train", 5 * SMALL), ("test", SMALL)):
        x, _ = records(count, 0)
        y = np.stack([np.arange(count) % 20, 99 - np.arange(count)], axis=1)
        if version == "binary":
            (folder / f"{part}.bin").write_bytes(
                np.concatenate([y.astype(np.uint8), x], axis=1).tobytes()
            )
        else:
            content = {
                "data": x,
                "coarse_labels": y[:, 0].tolist(),
                "fine_labels": y[:, 1].tolist(),
            }
            (folder / part).write_bytes(as_python2(content))
    dataset = load_dataset("cifar100", {"labels": labels}, tmp_path)
    assert np.array_equal(dataset.train.y, y_of(5 * SMALL, column))
    assert np.array_equal(dataset.test.x.reshape(SMALL, -1), records(SMALL, 0)[0])
    assert len(dataset.classes) == (100 if labels == "fine" else 20)
    assert len(set(dataset.classes)) == len(dataset.classes)


def y_of(count: int, column: int) -> np.ndarray:
    return np.arange(count) % 20 if column == 0 else 99 - np.arange(count)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda raw: raw[:-1],
            f"expected {SMALL} records of 3073 bytes, {SMALL * 3073} bytes in all, found"
            f" {SMALL * 3073 - 1} bytes",
        ),
        (lambda raw: raw + b"\0", f"found {SMALL * 3073 + 1} bytes"),
        (lambda raw: raw[:3073], "found 3073 bytes"),
        (lambda raw: b"\x0a" + raw[1:], "expected labels from 0 to 9, found labels from 2 to 10"),
    ],
)
def test_damaged_binary_files_are_named(tmp_path: Path, change: object, complaint: str) -> None:
    write_binary10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(
        InputError, match=rf"data_batch_2\.bin is damaged or not the right file: .*{complaint}"
    ):
        load_dataset("cifar10", {}, tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"labels": [0, 1, 2]}, "an array 'data' of .*found none"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1, 2]}, r"found one of \(2, 3072\)"),
        (
            {"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1]},
            "'labels' of 3 numbers, found a list of 2",
        ),
        ({"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1, "x"]}, "'labels' of 3 numbers"),
        ({"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1, 10]}, "labels from 0 to 9"),
        ({"data": np.zeros((3, 3072), np.uint8), "labels": [0, 1, 2**80]}, "labels from 0 to 9"),
        (
            {"data": np.zeros((3, 3072), np.int8), "labels": [0, 1, 2]},
            "contains an array that is not uint8",
        ),
        (
            {"data": np.zeros((3, 2), np.float64), "labels": [0, 1, 2]},
            "contains an array that is not",
        ),
        ({"data": np.zeros(3, np.uint8)}, "contains an array without two dimensions"),
        ([1, 2], "a pickled dictionary, found a pickled list"),
    ],
)
def test_pickles_of_something_else_are_refused(
    tmp_path: Path, content: object, complaint: str
) -> None:
    write_python10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").write_bytes(
        pickle.dumps(content, protocol=4)
    )
    with pytest.raises(InputError, match=f"data_batch_4 is .*{complaint}"):
        load_dataset("cifar10", {}, tmp_path)


class RunsACommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_a_command_runs_nothing(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "it ran"
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": RunsACommand(f"touch '{witness}'")}, protocol=protocol))
    with pytest.raises(
        InputError, match=r"data_batch_1 is rejected because it contains \w+\.system"
    ):
        read_plain_pickle(path, 1 << 20)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "a complete pickle"),
        (b"\x80\x04}", "a complete pickle"),
        (b"not a pickle", "a complete pickle"),
        (b"\x80\x02cnumpy\nndarray\n)R.", r"a call of numpy\.ndarray"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", r"builtins\.eval"),
        (b"\x80\x02cnumpy.core.multiarray\nscalar\n.", r"numpy\.core\.multiarray\.scalar"),
        (b"\x80\x02cnumpy\ndtype\n}U\x04codeK\x01sb.", "a change to a function"),
        # one instruction would allocate 64 GiB of places
        (b"\x80\x02}r\xff\xff\xff\xff.", "a memo of unreasonable size"),
        (b"\x80\x02Pname\n.", "the instruction PERSID"),
        (b"\x80\x02(ios\nsystem\n.", "the instruction INST"),
        # a byte array that claims a terabyte
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "a complete pickle"),
        # hashing deep tuples can exhaust the stack
        (b"\x80\x02)" + b"\x85" * 101 + b".", "more than 100 tuples"),
        # hashing tuples of tuples of the same tuple never ends
        (b"\x80\x02N\x85q\x00h\x00\x86.", "used twice"),
    ],
)
def test_hostile_and_broken_pickles_are_refused(tmp_path: Path, raw: bytes, complaint: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=f"batch is .*{complaint}"):
        read_plain_pickle(path, 1 << 20)


def test_pickles_above_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"x" * 11)
    with pytest.raises(InputError, match="expected at most 10 bytes, found 11 bytes"):
        read_plain_pickle(path, 10)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(
        InputError,
        match=r"dataset 'cifar10' was not found: .*cifar-10-batches-bin lacks"
        r" data_batch_3\.bin.*cifar-10-binary\.tar\.gz",
    ):
        load_dataset("cifar10", {}, tmp_path)


def test_unknown_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no labels 'medium': choose labels='fine'"):
        load_dataset("cifar100", {"labels": "medium"}, tmp_path)
