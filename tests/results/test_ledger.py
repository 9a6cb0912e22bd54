from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from remanence.core.errors import InputError
from remanence.results.ledger import (
    ALL,
    GLOBAL,
    MOMENTS,
    SPLITS,
    Ledger,
    header,
    make_record,
    record_type,
)

NAMES = ("cat", "dog")
CONFUSION = np.array([[3, 1], [2, 4]])


def record(
    round: int = 1,
    moment: str = "merged",
    split: str = "test",
    model: int = GLOBAL,
    confusion: np.ndarray = CONFUSION,
) -> np.ndarray:
    return make_record(
        2,
        confusion,
        round=round,
        time_step=7,
        moment=moment,
        split=split,
        model=model,
        owner=ALL,
        weight=0.25,
        loss=1.5,
    )


def write(path: Path, *records: np.ndarray) -> Path:
    path.write_bytes(header(NAMES) + b"".join(r.tobytes() for r in records))
    return path


def test_a_record_by_hand() -> None:
    """4 cats of which 3 are seen as such, 6 dogs of which 4; 5 were called cat and 5 dog."""
    made = record()[0]
    assert made["correct"].tolist() == [3, 4]
    assert made["total"].tolist() == [4, 6]
    assert made["predicted"].tolist() == [5, 5]
    assert (
        made["round"],
        made["time_step"],
        made["model"],
        made["owner"],
        made["weight"],
        made["loss"],
    ) == (1, 7, GLOBAL, ALL, 0.25, 1.5)
    assert (MOMENTS[made["moment"]], SPLITS[made["split"]]) == ("merged", "test")


def test_the_size_of_a_record_is_fixed_by_the_number_of_classes() -> None:
    """4 + 4 + 1 + 1 + 4 + 4 + 8 + 8 = 34 bytes, and three 4-byte counts a class."""
    assert record_type(0).itemsize == 34
    assert record_type(10).itemsize == 34 + 3 * 4 * 10


def test_the_words_of_a_record_are_checked() -> None:
    with pytest.raises(ValueError, match=r"not in"):
        record(moment="later")
    with pytest.raises(ValueError, match="no field"):
        make_record(2, CONFUSION, moment="merged", split="test", rund=3)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = [record(1), record(2, model=3, moment="local")]
    ledger = Ledger.read(write(tmp_path / "ledger.bin", *written))
    assert ledger.class_names == NAMES
    assert ledger.records.tobytes() == b"".join(r.tobytes() for r in written)


def test_numpy_alone_can_read_it(tmp_path: Path) -> None:
    """One line of JSON, then records: nothing of ours is needed."""
    path = write(tmp_path / "ledger.bin", record(1), record(2))
    first, rest = path.read_bytes().split(b"\n", 1)
    about = json.loads(first)
    assert about == {
        "format": 1,
        "class_names": list(NAMES),
        "moments": list(MOMENTS),
        "splits": list(SPLITS),
    }
    assert np.frombuffer(rest, dtype=record_type(len(about["class_names"])))["round"].tolist() == [
        1,
        2,
    ]


def test_names_with_line_breaks_stay_on_one_line() -> None:
    line = header(["one\ntwo", "größe"])
    assert line.count(b"\n") == 1
    assert json.loads(line)["class_names"] == ["one\ntwo", "größe"]


@pytest.mark.parametrize("cut", [1, 20, record_type(2).itemsize - 1])
def test_a_record_cut_short_is_ignored(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "ledger.bin", record(1), record(2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert Ledger.read(path).records["round"].tolist() == [1]


def test_a_ledger_without_records(tmp_path: Path) -> None:
    ledger = Ledger.read(write(tmp_path / "ledger.bin"))
    assert len(ledger.records) == 0
    rounds, accuracy = ledger.per_class()
    assert rounds.shape == (0,)
    assert accuracy.shape == (0, 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"not json\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"3\n",
        b"{}\n",
        b'{"format": 1}\n',
        b'{"format": 1, "class_names": 3}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_not_a_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.bin"
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"ledger\.bin is not a ledger: its first line cannot be read"
    ):
        Ledger.read(path)


def test_a_ledger_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    path.write_bytes(b'{"format": 2, "class_names": []}\n')
    with pytest.raises(
        InputError, match=r"written by another version \(format 2, this one reads 1\)"
    ):
        Ledger.read(path)


def test_no_ledger_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no ledger at .*ledger.bin"):
        Ledger.read(tmp_path / "ledger.bin")


def test_selecting_by_moment_split_and_model(tmp_path: Path) -> None:
    ledger = Ledger.read(
        write(
            tmp_path / "ledger.bin",
            record(1, "before"),
            record(2, "local", model=0),
            record(3, "local", model=5),
            record(4, "local", split="valid", model=5),
            record(5, "merged"),
        )
    )
    assert ledger.select()["round"].tolist() == [1, 2, 3, 4, 5]
    assert ledger.select(moment="local")["round"].tolist() == [2, 3, 4]
    assert ledger.select(moment="local", split="test")["round"].tolist() == [2, 3]
    assert ledger.select(model=0)["round"].tolist() == [2]
    assert ledger.select(model=5, split="valid")["round"].tolist() == [4]
    assert ledger.select(moment="refined")["round"].tolist() == []


def test_accuracy_per_class_over_rounds(tmp_path: Path) -> None:
    """3/4 and 4/6 in round 1; in round 2 there are no dogs."""
    ledger = Ledger.read(
        write(
            tmp_path / "ledger.bin",
            record(1),
            record(1, split="valid"),
            record(1, moment="local", model=3),
            record(2, confusion=np.array([[1, 1], [0, 0]])),
        )
    )
    rounds, accuracy = ledger.per_class()
    assert rounds.tolist() == [1, 2]
    np.testing.assert_array_equal(accuracy, [[3 / 4, 4 / 6], [1 / 2, np.nan]])


def test_a_table_for_pandas(tmp_path: Path) -> None:
    ledger = Ledger.read(
        write(
            tmp_path / "ledger.bin",
            record(1),
            record(2, "local", "valid", 3, np.array([[0, 1], [2, 0]])),
        )
    )
    table = ledger.to_pandas()
    assert table["round"].tolist() == [1, 1, 2, 2]
    assert table["class_name"].tolist() == ["cat", "dog", "cat", "dog"]
    assert table["class"].tolist() == [0, 1, 0, 1]
    assert table["correct"].tolist() == [3, 4, 0, 0]
    assert table["total"].tolist() == [4, 6, 1, 2]
    assert table["predicted"].tolist() == [5, 5, 2, 1]
    assert table["moment"].tolist() == ["merged", "merged", "local", "local"]
    assert table["split"].tolist() == ["test", "test", "valid", "valid"]
    assert table["model"].tolist() == [GLOBAL, GLOBAL, 3, 3]


def test_without_pandas_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InputError, match=r"pip install 'remanence-fl\[parquet\]'"):
        Ledger.read(write(tmp_path / "ledger.bin", record())).to_pandas()


def test_parquet_holds_what_pandas_shows(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    ledger = Ledger(
        make_record(
            2,
            np.array([[3, 1], [0, 2]]),
            round=4,
            moment="merged",
            split="test",
            model=-1,
            owner=-1,
            loss=1.5,
        ),
        ["cat", "dog"],
    )
    path = ledger.to_parquet(tmp_path / "ledger.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(path), ledger.to_pandas())
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.parquet"]
