"""What a run left behind, read with distrust: a cut last line is no damage, everything else
that we do not write is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from remanence.core.errors import InputError, UnsafeFile
from remanence.results.ledger import Ledger
from remanence.results.readers import (
    check_metadata,
    check_plan,
    read_lines,
    read_records,
    read_table,
    read_toml,
    validate_metrics_row,
)
from remanence.results.run import Run

LINE: dict[str, Any] = {
    "round": 1,
    "model": "global",
    "split": "test",
    "accuracy": 0.5,
    "per_class": [0.5, None],
    "rejected": [],
    "abandoned": False,
}


def write_lines(path: Path, *texts: str, end: str = "\n") -> Path:
    path.write_text("\n".join(texts) + end)
    return path


def test_lines_are_read_and_a_cut_last_one_is_left_out(tmp_path: Path) -> None:
    path, text = tmp_path / "metrics.jsonl", json.dumps(LINE)
    assert read_lines(path) == []
    assert read_lines(write_lines(path, text, text)) == [LINE, LINE]
    assert read_lines(write_lines(path, text, text[:20], end="")) == [LINE]
    # a whole line, with its end, that is none
    with pytest.raises(InputError, match="line 2 is not JSON"):
        read_lines(write_lines(path, text, text[:20]))
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_lines(write_lines(path, text[:20], text))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"round": "1"}, "which round"),
        ({"round": -1}, "which round"),
        ({"round": True}, "which round"),
        ({"round": 2**40}, "which round"),
        ({"model": 3}, "which model"),
        ({"split": None}, "which split"),
        ({"accuracy": "high"}, "an accuracy that is not a number"),
        ({"seconds": 10**400}, "a seconds that is not a number"),
        ({"epsilon": "3"}, "an epsilon that is not a number"),
        ({"per_class": [0.5, "x"]}, "a per_class"),
        ({"per_class": 3}, "a per_class"),
        ({"per_class": [0.5]}, "has 1 classes where others have 2"),
        ({"rejected": [{"client": "x", "code": "shape"}]}, "rejected replies"),
        ({"rejected": 3}, "rejected replies"),
        ({"no_response": ["x"]}, "no_response"),
    ],
)
def test_lines_that_we_do_not_write(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    assert validate_metrics_row(LINE) == ""
    with pytest.raises(InputError, match=f"line 2 .*{fault}"):
        read_lines(write_lines(tmp_path / "m", json.dumps(LINE), json.dumps(LINE | changes)))


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "[" * 100_000, "9" * 10_000, '"\\ud800"', "[]", "3"]
)
def test_odd_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="line 1 "):
        read_lines(write_lines(tmp_path / "m", text, json.dumps(LINE)))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\xff\xfe\n" + json.dumps(LINE).encode() + b"\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_lines(tmp_path / "m")
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not valid TOML"):
        read_toml(tmp_path / "t")
    with pytest.raises(InputError, match="cannot read"):
        read_toml(tmp_path / "absent")


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    kind = np.dtype([("round", "<i4"), ("time_step", "<i4")])
    for read in (read_toml, read_lines, Ledger.read, lambda path: read_records(path, kind, {})):
        with pytest.raises(UnsafeFile, match="is a folder where a regular file belongs"):
            read(tmp_path)


def test_records_within_their_limits(tmp_path: Path) -> None:
    kind = np.dtype([("round", "<i4"), ("time_step", "<i4"), ("moment", "u1")])
    good = np.array([(1, 0, 2), (2, 1, 0)], dtype=kind)
    path = tmp_path / "r.bin"
    assert read_records(path, kind, {"moment": 3}) is None
    path.write_bytes(good.tobytes()[:-1])
    read = read_records(path, kind, {"moment": 3})
    assert read is not None
    assert read["round"].tolist() == [1]  # the second was cut short
    for bad in ((1, 0, 3), (-1, 0, 0), (1, -1, 0), (1, 10**6, 0), (2**30, 0, 0)):
        path.write_bytes(np.array([bad], dtype=kind).tobytes())
        with pytest.raises(InputError, match="is damaged"):
            read_records(path, kind, {"moment": 3})


def test_tables_of_numbers(tmp_path: Path) -> None:
    assert read_table(tmp_path, ["3 0 1", "0 2 2"]) == [[3, 0, 1], [0, 2, 2]]
    for rows in (["3 x"], [3], "3 0", ["1 2", "1"], ["-1"], ["9" * 20]):
        with pytest.raises(InputError, match="is damaged"):
            read_table(tmp_path, rows)


@pytest.mark.parametrize(
    "about",
    [
        {"clients": "6"},
        {"clients": 0},
        {"clients": 10**9},
        {"class_names": [3]},
        {"mean": ["x"]},
        {"shape": [0]},
        {"parameters": True},
        {"objects": "model"},
        {"guarantees": [{"unit": "client"}]},
        {"guarantees": [{"unit": "client", "basis": "b", "delta": "x", "budget": 0}]},
    ],
)
def test_facts_that_cannot_be(tmp_path: Path, about: dict[str, Any]) -> None:
    check_metadata(tmp_path, {"clients": 6, "class_names": ["a"], "mean": [0.5], "shape": [3]})
    with pytest.raises(InputError, match=f"about.{next(iter(about))}"):
        check_metadata(tmp_path, about)


CELL = {"name": "fedavg-seed0", "method": "fedavg", "setting": "", "seed": 0}
PLAN: dict[str, Any] = {
    "select": "all",
    "cells": [CELL],
    "experiments": {"fedavg-seed0": {}},
    "engine": {"name": "sequential", "threads": 1, "reason": ""},
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cells": 3}, "cells and experiments"),
        ({"cells": [3]}, "no name, method or seed"),
        ({"cells": [CELL | {"seed": "0"}]}, "no name, method or seed"),
        ({"cells": [CELL | {"name": "../x"}]}, "not the name of a folder"),
        ({"experiments": {}}, "has no experiment"),
        ({"experiments": []}, "cells and experiments"),
        ({"engine": {"name": 3}}, "engine"),
        ({"engine": {"threads": "rm"}}, "engine"),
        ({"select": 3}, "select"),
    ],
)
def test_plans_that_are_none_of_ours(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    check_plan(tmp_path, PLAN)
    path = tmp_path / "compare.toml"
    path.write_text(tomli_w.dumps(PLAN | changes))
    with pytest.raises(InputError, match=fault):
        check_plan(path, read_toml(path))


def test_an_entry_that_the_metadata_lack_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("rounds = 2\n[about]\nclients = 3\n")
    metadata = Run(tmp_path).metadata
    assert metadata["clients"] == 3
    assert metadata.get("shape") is None
    with pytest.raises(InputError, match=r"experiment\.toml is damaged: it has no about\.shape"):
        metadata["shape"]
