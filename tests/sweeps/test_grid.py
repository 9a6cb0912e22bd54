"""Comparisons: the same draws for every method, a grid chosen by validation, and cells that can
be interrupted anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

import remanence as rem
from remanence.core.errors import OUT_OF_TIME, InputError, Stopped
from remanence.core.progress import NullProgress
from remanence.reports.tables import chosen_rows
from remanence.results.run import COMPARISON, RUNS, Comparison
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.grid import resume_comparison

SMALL: dict[str, Any] = {
    "data": "synthetic(samples=300, classes=3, features=5)",
    "model": "mlp(hidden=6)",
    "clients": 5,
    "sample": 3,
    "rounds": 3,
    "engine": "sequential",
    "quiet": True,
}


def test_methods_by_seeds_one_folder_each(tmp_path: Path) -> None:
    done = rem.compare("fedavg; fedavg+wsm", seeds=2, out=tmp_path / "c", **SMALL)
    assert [(cell["method"], cell["seed"]) for cell in done.cells] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedavg+wsm", 0),
        ("fedavg+wsm", 1),
    ]
    assert all(run.finished for run in done.runs)
    assert [run.config.seed for run in done.runs] == [0, 1, 0, 1]
    # the same clients hold the same rows whatever the method
    assert done.runs[0].metadata["label_counts"] == done.runs[2].metadata["label_counts"]
    assert done.runs[0].metadata["label_counts"] != done.runs[1].metadata["label_counts"]
    rows = chosen_rows(done)
    assert [row.method for row in rows] == ["fedavg", "fedavg+wsm"]
    assert all(row.deviation is not None and row.seeds == 2 for row in rows)


def test_a_run_inside_a_comparison_equals_the_run_alone(tmp_path: Path) -> None:
    done = rem.compare("fedprox(mu=0.1)", seeds=[4], out=tmp_path / "c", **SMALL)
    alone = rem.run(method="fedprox(mu=0.1)", seed=4, out=tmp_path / "r", **SMALL)
    assert done.runs[0].curve() == alone.curve()


def test_a_grid_is_chosen_by_validation_never_by_test(tmp_path: Path) -> None:
    done = rem.compare(
        "fedavg",
        seeds=2,
        grid={"lr": [0.0001, 0.2]},
        out=tmp_path / "c",
        **SMALL,
    )
    assert len(done.runs) == 4
    assert {run.config.local.lr for run in done.runs} == {0.0001, 0.2}
    (row,) = chosen_rows(done)
    by_setting: dict[str, list[float]] = {}
    for cell, run in zip(done.cells, done.runs, strict=True):
        by_setting.setdefault(cell["setting"], []).append(run.curve("valid")[1][-1])
    best = max(by_setting, key=lambda setting: sum(by_setting[setting]))
    assert row.setting == best
    with pytest.raises(InputError, match=r"set data\.validation above 0, or .* --select all"):
        rem.compare(
            "fedavg",
            grid={"lr": [0.1]},
            validation=0.0,
            out=tmp_path / "d",
            **SMALL,
        )


def test_a_grid_varies_options_of_the_methods_that_have_them(tmp_path: Path) -> None:
    done = rem.compare(
        "fedavg; fedprox+wsm", grid={"fedprox.mu": [0.1, 1.0]}, out=tmp_path / "c", **SMALL
    )
    assert [run.config.method for run in done.runs] == [
        "fedavg",
        "fedprox(mu=0.1)+wsm",
        "fedprox(mu=1.0)+wsm",
    ]
    assert [(cell["method"], cell["setting"]) for cell in done.cells] == [
        ("fedavg", ""),
        ("fedprox+wsm", "mu=0.1"),
        ("fedprox+wsm", "mu=1.0"),
    ]
    assert [row.method for row in chosen_rows(done)] == ["fedavg", "fedprox+wsm"]


def test_conditions_are_all_shown_and_a_setting_is_selected_in_each(tmp_path: Path) -> None:
    grid = {"attack": ["", "sign_flip(fraction=0.4)"], "local.lr": [0.0001, 0.2]}
    rows = chosen_rows(rem.compare("fedavg", grid=grid, out=tmp_path / "c", **SMALL))
    assert [row.setting.partition(", lr=")[0] for row in rows] == [
        "attack=",
        "attack=sign_flip(fraction=0.4)",
    ]
    assert [row.variants for row in rows] == [2, 2]


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    straight = rem.compare("fedavg; fedavg+tce", seeds=2, out=tmp_path / "straight", **SMALL)
    with pytest.raises(Stopped, match="remanence resume") as stop:
        rem.compare("fedavg; fedavg+tce", seeds=2, out=tmp_path / "c", time_limit=0.0, **SMALL)
    assert stop.value.exit_code == OUT_OF_TIME
    assert len(Comparison(tmp_path / "c").runs) == 1
    sessions = 0
    while True:
        try:
            done = rem.resume(tmp_path / "c", quiet=True, time_limit=0.0)
            break
        except Stopped:
            sessions += 1
            assert sessions < 20
    assert isinstance(done, Comparison)
    assert [run.curve() for run in done.runs] == [run.curve() for run in straight.runs]
    before = sorted((tmp_path / "c" / RUNS).rglob("*.safetensors"))
    rem.resume(tmp_path / "c", quiet=True)  # nothing left to do
    assert sorted((tmp_path / "c" / RUNS).rglob("*.safetensors")) == before


def test_mistakes_are_found_before_anything_runs(tmp_path: Path) -> None:
    for methods, more, words in [
        ("fedavg; fedavgg", {}, "did you mean fedavg"),
        ("fedavg; fedavg", {}, "is given twice"),
        ("", {}, "no methods"),
        ("fedavg", {"grid": {"lr": []}}, "no values"),
        ("fedavg", {"grid": {"lrr": [0.1]}}, "unknown key"),
        ("fedprox", {"grid": {"mu": [0.1, 1.0]}}, "write --grid fedprox.mu="),
        ("fedavg", {"grid": {"fedprox.mu": [0.1, 1.0]}}, "no method of the comparison has fedprox"),
        ("fedprox", {"grid": {"fedprox.nu": [0.1]}}, "has no option 'nu'"),
        ("fedavg", {"seeds": []}, "at least one seed"),
        ("fedavg", {"seeds": [1, 0, 1]}, "seed 1 is given twice"),
        ("fedavg", {"grid": {"method": ["fedavg", "scaffold"]}}, "use --methods"),
        ("fedavg", {"method": "scaffold"}, "use --methods"),
        ("fedavg", {"grid": {"seed": [1, 2]}}, "use --seeds"),
        ("fedavg", {"select": "best"}, "all or validation"),
        ("fedavg; fedprox(mu=-1)", {}, "mu must be"),
        ("fedavg", {"grid": {"batch_size": [0]}}, "local.batch_size"),
    ]:
        with pytest.raises(InputError, match=words):
            rem.compare(methods, out=tmp_path / "c", **SMALL, **more)
        assert not (tmp_path / "c").exists()


ENGINE = {"name": "sequential", "threads": 1, "reason": "as asked"}


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        (ENGINE | {"name": "sequentiall"}, "its engine is unknown or has unknown settings"),
        (ENGINE | {"fibers": 1}, "its engine is unknown or has unknown settings"),
        (ENGINE | {"threads": -1}, "its engine is unknown or has unknown settings"),
        ({}, "its engine is unknown or has unknown settings"),
        (None, "it does not describe its runs"),
    ],
)
def test_a_damaged_plan_is_not_resumed(
    tmp_path: Path, engine: dict[str, Any] | None, fault: str
) -> None:
    with pytest.raises(Stopped):
        rem.compare("fedavg", seeds=2, out=tmp_path / "c", time_limit=0.0, **SMALL)
    plan = dict(Comparison(tmp_path / "c").plan)
    if engine is None:
        del plan["experiments"]
    (tmp_path / "c" / COMPARISON).write_text(tomli_w.dumps(plan | {"engine": engine or {}}))
    with pytest.raises(InputError, match=fault):
        resume_comparison(tmp_path / "c", progress=NullProgress(), time_limit=TimeLimit(None))


def test_hostile_method_names_stay_inside_the_folder(tmp_path: Path) -> None:
    done = rem.compare("fedprox(mu=0.5)", out=tmp_path / "c", **SMALL)
    (run,) = done.runs
    assert run.folder.parent == tmp_path / "c" / RUNS
    assert run.folder.name == "fedprox-mu=0.5-seed0"
    assert (tmp_path / "c" / COMPARISON).is_file()
