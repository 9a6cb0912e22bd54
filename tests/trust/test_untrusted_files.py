"""Untrusted files and folders run no code, reach nothing outside, cannot exhaust memory, and are
not accepted if they change under a run.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rounds.test_resume import contents, seeded_net, small_config
from trust.faults import record_trial
from trust.mutations import bounded

from remanence import api
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.data.mnist_idx import read_idx
from remanence.data.npz_reader import read_npz
from remanence.data.svhn_mat import read_mat
from remanence.results.run import COMPARISON, EXPERIMENT, RUNS, Comparison
from remanence.rounds.loop import resume_run, start_run

CODE = "evil_module:Net"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that writes a file when it is imported."""
    mark = tmp_path / "imported"
    (tmp_path / "evil_module.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Net: pass\n")
    monkeypatch.chdir(tmp_path)
    return mark


def test_no_file_and_no_folder_decides_what_is_imported(tmp_path: Path, evil: Path) -> None:
    run = tmp_path / "run"
    start_run(small_config(rounds=2), run, module=seeded_net())
    text = (run / EXPERIMENT).read_text().replace('objects = [\n    "model",\n]', "objects = []")
    lines = [
        f'model = "{CODE}"' if line.startswith("model = ") else line for line in text.splitlines()
    ]
    (run / EXPERIMENT).write_text("\n".join(lines))
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f'model = "{CODE}"\n')
    comparison = tmp_path / "comparison"
    comparison.mkdir()
    cell = {"name": "a", "method": "fedavg", "setting": "", "seed": 0}
    plan = {
        "select": "all",
        "engine": {"name": "sequential", "threads": 1, "reason": ""},
        "cells": [cell],
        "experiments": {"a": {"model": CODE}},
    }
    (comparison / COMPARISON).write_text(tomli_w.dumps(plan))
    commands = [
        ["run", str(experiment), "--out", str(tmp_path / "out")],
        ["compare", str(experiment), "--methods", "fedavg", "--out", str(tmp_path / "out")],
        ["resume", str(run), "--rounds", "4"],
        ["resume", str(comparison)],
        ["evaluate", str(run)],
        ["export", str(run)],
    ]
    for command in commands:
        with pytest.raises(InputError, match=r"imports and runs Python code .*--allow-code"):
            app(command, standalone_mode=False)
    assert not evil.exists()
    # allowed, it is imported, and is no network
    with pytest.raises(Exception, match=r"evil|Net|Module|subclass|network"):
        app(["resume", str(run), "--rounds", "4", "--allow-code"], standalone_mode=False)
    assert evil.exists()
    record_trial(
        "a file or folder that names code to import",
        "rejected; nothing was imported",
        len(commands),
    )


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/tmp/elsewhere", "..", "a/b", "", ".hidden", "a\x00b", "x" * 300]
)
def test_a_comparison_cannot_reach_outside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "comparison"
    folder.mkdir(parents=True)
    cell = {"name": name, "method": "fedavg", "setting": "", "seed": 0}
    config = small_config(rounds=1).model_dump(mode="json", exclude_none=True)
    plan = {
        "select": "all",
        "engine": {"name": "sequential", "threads": 1, "reason": ""},
        "cells": [cell],
        "experiments": {name: config},
    }
    (folder / COMPARISON).write_text(tomli_w.dumps(plan))
    before = sorted(path for path in tmp_path.rglob("*"))
    for use in (lambda: Comparison(folder).runs, lambda: api.resume(folder, quiet=True)):
        with pytest.raises(InputError, match="is not the name of a folder"):
            use()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert not (folder / RUNS).exists()
    record_trial("a comparison whose runs are in other folders", "rejected; nothing was written", 2)


def bomb_idx(path: Path) -> Callable[[], Any]:
    header = bytes((0, 0, 8, 3)) + struct.pack(">3I", 1000, 1000, 1500)  # declares 1.5 GB, has none
    path.write_bytes(gzip.compress(header))
    return lambda: read_idx(path.rename(path.with_suffix(".gz")), 3)


def bomb_idx_beyond(path: Path) -> Callable[[], Any]:
    path.write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**31, 2**31, 2**31))
    return lambda: read_idx(path, 3)


def bomb_npz(path: Path) -> Callable[[], Any]:
    """Four gigabytes of zeros in four megabytes."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": (4 << 30,)}
    )
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(head.getvalue())
        for _ in range(64):
            member.write(bytes(1 << 20))
    return lambda: read_npz(path)


def bomb_mat(path: Path) -> Callable[[], Any]:
    """Two hundred megabytes of zeros in two hundred kilobytes."""
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    path.write_bytes(
        b"MATLAB".ljust(124) + b"\x00\x01IM" + struct.pack("<2I", 15, len(packed)) + packed
    )
    return lambda: read_mat(path)


def bomb_shape(path: Path) -> Callable[[], Any]:
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
        )
    return lambda: read_npz(path)


@pytest.mark.parametrize("make", [bomb_idx, bomb_idx_beyond, bomb_npz, bomb_mat, bomb_shape])
def test_bombs_are_rejected_before_memory_is_allocated(tmp_path: Path, make: Any) -> None:
    read = make(tmp_path / "bomb")
    with bounded() as limit:
        limit()
        with pytest.raises(InputError, match="damaged or not the right file"):
            read()
    record_trial("archive bombs and headers with too large sizes", "rejected")


def test_a_changed_drift_table_is_rejected(tmp_path: Path) -> None:
    table = tmp_path / "drift.csv"
    table.write_text("0,0,1,1\n1,1,0,0\n")
    keys = {
        "data.name": "synthetic(samples=240, classes=4, features=6, test=0.25)", "model": "mlp(hidden=8)", "drift.schedule": f"table(path='{table}')",
        "drift.concepts": "swap", "drift.time_steps": 2, "clients.count": 4, "rounds": 2, "engine": "sequential", "threads": 1, "checkpoint.seconds": 0,
    }  # fmt: skip
    config = parse_experiment({}, keys)
    start_run(config, tmp_path / "straight")
    from rounds.test_decentralized import Dying

    with pytest.raises(ConnectionAbortedError):
        start_run(config, tmp_path / "run", progress=Dying(2))
    table.write_text("0,0,1,1\n1,0,1,0\n")
    with pytest.raises(
        InputError,
        match=r"the drift table .*drift\.csv has changed since the run began: put the old file"
        r" back",
    ):
        resume_run(tmp_path / "run")
    table.write_text("0,0,1,1\n1,1,0,0\n")
    resume_run(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial(
        "a drift table changed since the run began",
        "an error message; with the old file, the same bits",
    )


def test_changed_data_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    x = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.savez(file, x=x, y=np.arange(100) % 3)
    config = parse_experiment(
        {},
        {
            "data.name": str(file),
            "data.partition": "iid",
            "clients.count": 4,
            "rounds": 2,
            "engine": "sequential",
            "threads": 1,
        },
    )
    start_run(config, tmp_path / "run")
    np.savez(file, x=x, y=np.arange(100) // 34)
    from remanence.experiment.data_setup import _load

    _load.cache_clear()
    with pytest.raises(InputError, match="have changed since the run began"):
        resume_run(tmp_path / "run", rounds=4)
    _load.cache_clear()
    record_trial("data changed since the run began", "an error message; the run did not resume")
