"""A folder that another person has prepared: links and special files in it are neither followed nor
opened, whatever the command.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core.unsafe_files import (
    PLANTS,
    assert_untouched,
    link_to_device,
    link_to_file,
    link_to_folder,
    make_outside,
    pipe,
)
from trust.faults import record_trial

import remanence as rem
from remanence.core.errors import UnsafeFile
from remanence.core.files import LOCK, sha256
from remanence.exports import evaluate, export
from remanence.recipes.outcomes import OUTCOME, read_outcome
from remanence.reports import write_report
from remanence.reports.live_state import ReportState, find_results
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.manifest import CHECKPOINTS, MANIFEST, OWN, STATE
from remanence.results.run import COMPARISON, EXPERIMENT, LEDGER, METRICS, REPORT, RUNS

Plant = Callable[[Path, Path], None]
FAULT = "links and special files in the place of files and folders of a run"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds whose clients keep states, and a comparison of it."""
    home = tmp_path_factory.mktemp("made")
    settings: dict[str, Any] = {
        "data": "synthetic(samples=80, classes=2, features=3)",
        "model": "mlp(hidden=2)",
        "clients": 2,
        "rounds": 2,
        "engine": "sequential",
        "quiet": True,
        "set": {"checkpoint.seconds": 0, "threads": 1},
    }
    rem.run(method="scaffold", out=home / "run", **settings)
    rem.compare(["scaffold"], out=home / "comparison", **settings)
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path / "outside")


def replace_by(plant: Plant, path: Path, outside: Path) -> None:
    """Put a link or a special file in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    plant(path, outside)


def resume(run: Path) -> None:
    rem.resume(run, rounds=3, quiet=True)


NEWEST = f"{CHECKPOINTS}/round-0000002"
CLIENT = f"{CHECKPOINTS}/{OWN}/client-0000000.round-0000002.safetensors"
NEEDED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "resume": (
        resume,
        [
            *(LOCK, EXPERIMENT, METRICS, LEDGER, CHECKPOINTS, f"{CHECKPOINTS}/{OWN}"),
            *(f"{NEWEST}/{MANIFEST}", f"{NEWEST}/{STATE}", CLIENT),
        ],
    ),
    "evaluate": (
        lambda run: evaluate(rem.load(run)),
        [EXPERIMENT, METRICS, LEDGER, CHECKPOINTS, f"{NEWEST}/{MANIFEST}", f"{NEWEST}/{STATE}"],
    ),
    "export": (
        lambda run: export(rem.load(run)),
        [f"{NEWEST}/{STATE}", "export", "export/model.safetensors", "export/model.json"],
    ),
    "report": (write_report, [EXPERIMENT, METRICS, LEDGER, f"{NEWEST}/{MANIFEST}", REPORT]),
}
CASES = [(command, name) for command, (_, names) in NEEDED.items() for name in names]


@pytest.mark.parametrize("plant", [link_to_file, pipe])
@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_command_refuses_a_link_and_does_not_wait_for_a_pipe(
    home: Path, outside: Path, command: str, name: str, plant: Plant
) -> None:
    (home / "run" / name).parent.mkdir(exist_ok=True)
    replace_by(plant, home / "run" / name, outside)
    with pytest.raises(UnsafeFile, match=rf"{Path(name).name} is a (link|named pipe) where a"):
        NEEDED[command][0](home / "run")
    assert_untouched(outside)
    record_trial(FAULT, "refused by name; nothing outside changed")


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", [LOCK, METRICS, CHECKPOINTS, f"{CHECKPOINTS}/{OWN}"])
def test_every_kind_of_link_and_special_file_is_refused(
    home: Path, outside: Path, plant: Plant, name: str
) -> None:
    replace_by(plant, home / "run" / name, outside)
    before = sorted(path.name for path in (home / "run").iterdir())
    with pytest.raises(UnsafeFile, match=Path(name).name):
        resume(home / "run")
    assert_untouched(outside)
    assert sorted({*before, LOCK}) == sorted({*os.listdir(home / "run"), LOCK})


def test_metrics_linked_to_a_file_of_the_user_with_a_forged_manifest(
    home: Path, outside: Path
) -> None:
    """The manifest gives the length and the hash of the user's file."""
    secret = outside / "secret"
    manifest = home / "run" / NEWEST / MANIFEST
    entries = json.loads(manifest.read_text())
    entries["run_files"] = entries.get("run_files", {})
    entries["run_files"][METRICS] = {"bytes": 3, "sha256": sha256(secret.read_bytes()[:3])}
    entries["file_lengths"] = {METRICS: 3, LEDGER: (home / "run" / LEDGER).stat().st_size}
    manifest.write_text(json.dumps(entries))
    replace_by(link_to_file, home / "run" / METRICS, outside)
    with pytest.raises(UnsafeFile, match=METRICS):
        resume(home / "run")
    assert_untouched(outside)


def test_overwriting_deletes_links_and_not_what_they_lead_to(home: Path, outside: Path) -> None:
    link_to_folder(home / "run" / "more", outside)
    link_to_folder(home / "run" / CHECKPOINTS / "round-0000009", outside)
    replace_by(link_to_file, home / "run" / LEDGER, outside)
    rem.run(
        data="synthetic(samples=40, classes=2, features=3)",
        model="mlp(hidden=2)",
        clients=2,
        rounds=1,
        engine="sequential",
        out=home / "run",
        overwrite=True,
        quiet=True,
    )
    assert_untouched(outside)
    assert not (home / "run" / "more").is_symlink()
    assert (home / "run" / LEDGER).is_file()


def test_a_record_with_a_second_name_is_not_written(home: Path, outside: Path) -> None:
    metrics = home / "run" / METRICS
    os.link(metrics, outside / "kept")
    content = metrics.read_bytes()
    with pytest.raises(UnsafeFile, match=r"has 2 names \(hard links\)"):
        resume(home / "run")
    assert (outside / "kept").read_bytes() == content


@pytest.mark.parametrize("name", [COMPARISON, RUNS, LOCK])
@pytest.mark.parametrize("plant", [link_to_file, link_to_folder, pipe])
def test_a_comparison_refuses_links(home: Path, outside: Path, name: str, plant: Plant) -> None:
    folder = home / "comparison"
    replace_by(plant, folder / name, outside)
    uses: list[Callable[[], object]] = [lambda: rem.resume(folder, quiet=True)]
    uses += [lambda: write_report(folder)] if name != LOCK else []
    for use in uses:
        with pytest.raises(UnsafeFile, match=rf"{name} is a "):
            use()
    assert_untouched(outside)


def test_a_comparison_reads_no_run_elsewhere(home: Path) -> None:
    """A cell of the comparison is a link to another run of the user, which is finished."""
    (cell,) = (home / "comparison" / RUNS).iterdir()
    content = (home / "run" / METRICS).read_bytes()
    replace_by(lambda path, outside: path.symlink_to(home / "run"), cell, home)
    with pytest.raises(UnsafeFile, match=f"{cell.name} is a link where a folder belongs"):
        rem.resume(home / "comparison", quiet=True)
    with pytest.raises(UnsafeFile, match=f"{cell.name} is a link where a folder belongs"):
        write_report(home / "comparison")
    assert (home / "run" / METRICS).read_bytes() == content


@pytest.mark.parametrize("plant", [link_to_device, pipe])
def test_the_live_report_names_what_it_does_not_open(
    home: Path, outside: Path, plant: Plant
) -> None:
    replace_by(plant, home / "run" / METRICS, outside)
    state = ReportState([home / "run"])
    state.state()
    _, page = state.page()
    assert b"metrics.jsonl is a " in page
    assert "metrics.jsonl is a " in state.state()["error"]


def test_the_live_report_finds_no_runs_through_links(home: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "link").symlink_to(home / "run")
    assert find_results(shelf) == []
    assert [found.name for found in find_results(home)] == ["comparison", "run"]


@pytest.mark.parametrize("plant", [link_to_device, pipe])
def test_a_stored_outcome_is_a_regular_file(tmp_path: Path, outside: Path, plant: Plant) -> None:
    (tmp_path / "outcome").mkdir()
    plant(tmp_path / "outcome" / OUTCOME, outside)
    with pytest.raises(UnsafeFile, match=f"{OUTCOME} is a "):
        read_outcome(tmp_path / "outcome")


@pytest.mark.parametrize("name", ["export", "export/tensorboard", "export/tensorboard/run"])
def test_tensorboard_is_not_given_a_link(
    home: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened: list[str] = []
    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    fake = SimpleNamespace(SummaryWriter=opened.append)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    (home / "run" / name).parent.mkdir(parents=True, exist_ok=True)
    link_to_folder(home / "run" / name, outside)
    with pytest.raises(UnsafeFile, match=f"{Path(name).name} is a link where a folder belongs"):
        export(rem.load(home / "run"), kind="tensorboard")
    assert not opened
    assert_untouched(outside)


@pytest.mark.parametrize("name", ["mlflow.db", "artifacts"])
def test_mlflow_is_not_given_a_link(home: Path, outside: Path, name: str) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    folder = home / "run" / "export" / "mlflow"
    folder.mkdir(parents=True)
    link_to_file(folder / name, outside)
    with pytest.raises(UnsafeFile, match=f"{name} is a link"):
        export(rem.load(home / "run"), kind="mlflow")
    assert_untouched(outside)


def test_files_with_holes_do_not_exhaust_memory(home: Path) -> None:
    """A file of 8 TB that takes no space on the disk."""
    os.truncate(home / "run" / LEDGER, 8 << 40)
    shutil.rmtree(home / "run" / CHECKPOINTS)
    with pytest.raises(rem.InputError, match=r"ledger\.bin takes 16\.0 TiB of memory"):
        _ = rem.load(home / "run").ledger


def test_client_states_of_a_link_are_not_deleted(home: Path, outside: Path) -> None:
    """Also by a program that has opened the checkpoints before the link was made."""
    run = rem.load(home / "run")
    store = CheckpointStore(run.checkpoints, fingerprint(run.config))
    state = store.load(torch.device("cpu"), lambda text: None)
    assert state is not None
    replace_by(link_to_folder, run.checkpoints / OWN, outside)
    store.last_round = -1
    with pytest.raises(UnsafeFile, match=OWN):
        store.save(state)
    assert_untouched(outside)
