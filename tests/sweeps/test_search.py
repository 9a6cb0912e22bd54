"""Searches: the value that a full grid finds, chosen without the test split, continued anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remanence as rem
from remanence.core.errors import OUT_OF_TIME, InputError, Stopped
from remanence.data import load_dataset
from remanence.reports.tables import chosen_rows
from remanence.results.run import COMPARISON, Comparison
from remanence.sweeps import scheduler, search
from remanence.sweeps.search import MAX_BEYOND, TABLE
from remanence.sweeps.search_result import SearchResult

SMALL: dict[str, Any] = {
    "data": "synthetic(samples=300, classes=3, features=5)",
    "model": "mlp(hidden=6)",
    "clients": 5,
    "sample": 3,
    "rounds": 3,
    "engine": "sequential",
    "quiet": True,
}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=24)",
    "clients": 6,
    "sample": 3,
    "rounds": 6,
    "batch_size": 16,
    "engine": "vectorized",
    "quiet": True,
}


def test_it_finds_what_a_full_grid_finds_and_trains_no_value_twice(tmp_path: Path) -> None:
    found = rem.search("fedavg", around=0.1, seeds=2, out=tmp_path / "s", **DIGITS)
    quarters = [float(f"{0.1 * 10 ** (i / 4):.3g}") for i in range(-8, 9)]
    grid = rem.compare("fedavg", grid={"lr": quarters}, seeds=2, out=tmp_path / "g", **DIGITS)
    (row,) = chosen_rows(grid)
    assert row.setting == f"lr={found.best}"
    assert row.validation == next(t.accuracy for t in found.tried if t.value == found.best)
    values = [tried.value for tried in found.tried]
    assert values == sorted(set(values))
    assert len(found.comparison.runs) == 2 * len(values) == 2 * 11
    assert [tried.stage for tried in found.tried].count("quarter") == 2
    assert set(values) < set(quarters)
    # two seeds on so few examples separate nothing
    assert found.not_separated
    assert "not separated from" in found.describe()


def test_reports_and_rem_load_open_the_folder_and_name_the_same_value(tmp_path: Path) -> None:
    found = rem.search("fedavg", around=0.1, out=tmp_path / "s", **SMALL)
    loaded = rem.load(found.folder)
    assert isinstance(loaded, Comparison)
    (row,) = chosen_rows(loaded)
    assert (row.setting, row.variants) == (f"lr={found.best}", len(found.tried))
    assert rem.report(found.folder).is_file()
    stored = json.loads((found.folder / TABLE).read_text())
    assert stored == json.loads(json.dumps(found.as_dict()))
    table = found.table().splitlines()
    assert len(table) == 1 + len(found.tried)
    assert [line.split()[1] for line in table if line.startswith("*")] == [f"{found.best:g}"]


def test_a_search_stopped_anywhere_goes_on_as_it_would_have(tmp_path: Path) -> None:
    straight = rem.search("fedavg", around=0.03, seeds=2, out=tmp_path / "straight", **SMALL)
    found, stops = None, []
    while found is None:
        try:
            if len(stops) % 2:
                found = rem.resume(tmp_path / "s", quiet=True, time_limit=0.0)
            else:  # the same command, too, goes on
                found = rem.search(
                    "fedavg", around=0.03, seeds=2, out=tmp_path / "s", time_limit=0.0, **SMALL
                )
        except Stopped as stop:
            stops.append(stop)
    assert len(stops) >= 2 * len(straight.tried)
    assert {stop.exit_code for stop in stops} == {OUT_OF_TIME}
    assert all(f"remanence resume {tmp_path / 's'}" in str(stop) for stop in stops)
    assert isinstance(found, SearchResult)
    assert found.as_dict() == straight.as_dict()
    assert [run.curve() for run in found.comparison.runs] == [
        run.curve() for run in straight.comparison.runs
    ]
    before = {file: file.stat().st_mtime_ns for file in found.folder.rglob("*.safetensors")}
    rem.resume(tmp_path / "s", quiet=True)  # nothing left to do
    assert {file: file.stat().st_mtime_ns for file in found.folder.rglob("*.safetensors")} == before


def test_a_search_that_ends_between_two_stages_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    straight = rem.search("fedavg", around=0.03, out=tmp_path / "straight", **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(search, "extend_comparison", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            rem.search("fedavg", around=0.03, out=tmp_path / "s", **SMALL)
    found = rem.search("fedavg", around=0.03, out=tmp_path / "s", **SMALL)
    assert len(found.tried) > 9
    assert found.as_dict() == straight.as_dict()


def test_the_values_of_a_stage_train_in_one_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def record(group: Any, *more: Any) -> Any:
        sizes.append(len(group))
        return run_batched(group, *more)

    run_batched = scheduler._run_batched
    monkeypatch.setattr(scheduler, "_run_batched", record)
    settings = {**DIGITS, "rounds": 2}
    together = rem.search("fedavg", around=0.1, out=tmp_path / "a", **settings)
    assert sizes[0] == 9
    sizes.clear()
    alone = rem.search("fedavg", around=0.1, batch_runs=1, out=tmp_path / "b", **settings)
    assert not sizes
    assert alone.best == together.best


def test_the_test_split_decides_nothing(tmp_path: Path) -> None:
    """A test set with other labels changes every test accuracy, and nothing that the search says."""
    source = load_dataset("synthetic", {"samples": 300, "classes": 3, "features": 5}, None)
    wrong = replace(source, test=replace(source.test, y=(source.test.y + 1) % 3))
    settings = {**SMALL, "rounds": 6}
    first = rem.search("fedavg", around=0.1, out=tmp_path / "a", **{**settings, "data": source})
    other = rem.search("fedavg", around=0.1, out=tmp_path / "b", **{**settings, "data": wrong})
    assert first.as_dict() == other.as_dict()

    def best_on_test(found: SearchResult) -> float:
        runs = found.comparison.runs
        return max(runs, key=lambda run: run.curve("test")[1][-1]).config.local.lr or 0.0

    assert best_on_test(other) != other.best


def test_it_goes_on_beyond_the_range_while_the_edge_is_the_best(tmp_path: Path) -> None:
    low = rem.search("fedavg", around=3e-4, out=tmp_path / "low", **DIGITS)
    beyond = [tried.value for tried in low.tried if tried.stage == "beyond"]
    assert beyond
    assert min(beyond) > 3e-4 * 100
    assert low.best is not None
    assert low.best > 3e-4 * 10
    far = rem.search("fedavg", around=1e-7, out=tmp_path / "far", **SMALL)
    assert sum(tried.stage == "beyond" for tried in far.tried) <= MAX_BEYOND


@pytest.mark.parametrize(
    ("method", "key", "around", "values"),
    [
        ("fedprox+wsm", "fedprox.mu", 0.1, {0.001, 0.1, 0.316, 10.0}),
        ("fedavg", "local.epochs", 2, {1, 2, 6, 20, 63, 200}),
        ("fedavg", "batch_size", 8, {1, 3, 8, 25, 80, 253, 800}),
        ("fedwavg", "fedwavg.alpha", 0.3, {0.003, 0.3, 0.949}),  # below 1
    ],
)
def test_any_number_can_be_searched(
    tmp_path: Path, method: str, key: str, around: float, values: set[float]
) -> None:
    settings = {**SMALL, "rounds": 1, "clients": 2, "sample": 2}
    found = rem.search(method, key=key, around=around, out=tmp_path / "s", **settings)
    tried = [t.value for t in found.tried]
    assert values <= set(tried)
    assert len(set(tried)) == len(tried)
    assert min(tried) > 0
    assert method != "fedwavg" or max(tried) < 1
    assert len(chosen_rows(found.comparison)) == 1


def test_divergence_is_the_worst_result_and_no_crash(tmp_path: Path) -> None:
    found = rem.search("fedavg", around=30, out=tmp_path / "s", **{**SMALL, "rounds": 2})
    assert {tried.diverged for tried in found.tried} == {True, False}
    assert [t.diverged for t in found.tried] == [t.accuracy is None for t in found.tried]
    lost = rem.search("fedavg", around=1e30, out=tmp_path / "d", **{**SMALL, "rounds": 2})
    assert all(tried.diverged for tried in lost.tried)
    assert lost.best is None
    assert not lost.learned
    assert "try a lower guess" in lost.describe()
    assert "diverged" in lost.table()
    assert len(lost.tried) == 9


def test_a_value_that_diverges_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rem.search("fedavg", around=0.1, out=tmp_path / "s", **SMALL)
    best = next(run for run in found.comparison.runs if run.config.local.lr == found.best)
    lines = [{**line, "loss": None} if line["split"] == "valid" else line for line in best.metrics]
    again = Comparison(found.folder)
    place = [run.folder for run in again.runs].index(best.folder)
    vars(again.runs[place])["metrics"] = lines
    spoiled = SearchResult(again)
    assert [t.value for t in spoiled.tried if t.diverged] == [found.best]
    assert spoiled.best not in (None, found.best)


def test_enough_seeds_that_agree_separate_a_value() -> None:
    from remanence.metrics.seed_noise import is_above

    clear = {0: 0.9, 1: 0.91, 2: 0.9}
    assert is_above(clear, {0: 0.5, 1: 0.5, 2: 0.52}, 2)
    assert not is_above(clear, {0: 0.5})  # a single common seed
    assert not is_above(clear, {0: 0.95, 1: 0.8, 2: 0.9})


def test_mistakes_are_found_before_anything_runs(tmp_path: Path) -> None:
    for more, words in [
        ({"around": 0.0}, "give a guess above 0"),
        ({"around": float("nan")}, "give a guess above 0"),
        ({"around": "high"}, "not a number"),
        ({"key": "round.lrr"}, "unknown key 'round.lrr'"),
        ({"key": "local.optimizer"}, "local.optimizer must be a text"),
        ({"key": "seed"}, "use --seeds"),
        ({"key": "fedprox.mu"}, "no method of the comparison has fedprox"),
        ({"lr": 0.1}, "also set to 0.1"),
        ({"seeds": []}, "at least one seed"),
        ({"validation": 0.0}, r"set data\.validation above 0"),
        ({"key": "data.validation", "around": 5.0}, "data.validation must be"),
    ]:
        with pytest.raises(InputError, match=words) as error:
            rem.search("fedavg", out=tmp_path / "s", **{"around": 0.1, **SMALL, **more})
        assert "\n" not in str(error.value)
        assert not (tmp_path / "s").exists()


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    rem.search("fedavg", around=0.1, out=tmp_path / "s", **SMALL)
    for more in (
        {"around": 0.2},
        {"seeds": 2},
        {"rounds": 4},
        {"key": "local.epochs", "around": 1},
    ):
        with pytest.raises(InputError, match="holds a search with other settings"):
            rem.search("fedavg", out=tmp_path / "s", **{"around": 0.1, **SMALL, **more})
    with pytest.raises(InputError, match="holds a search with other settings"):
        rem.search("fedprox", around=0.1, out=tmp_path / "s", **SMALL)
    again = rem.search("fedprox", around=0.1, out=tmp_path / "s", overwrite=True, **SMALL)
    assert again.comparison.cells[0]["method"] == "fedprox"
    rem.compare("fedavg", out=tmp_path / "c", **SMALL)
    with pytest.raises(InputError, match="holds an earlier run"):
        rem.search("fedavg", around=0.1, out=tmp_path / "c", **SMALL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("around = 0.1", 'around = "a"'),
        ("around = 0.1", "around = 1e200"),
        ("position = 0", "position = 0.5"),
        ("position = 8", "position = 2000000000"),
        ('stage = "half"', 'stage = "third"'),
        ('setting = "lr=0.1"', 'setting = "lr=0.2"'),
        ("[search]", "[s]"),
    ],
)
def test_a_damaged_plan_is_refused_or_is_a_comparison(tmp_path: Path, old: str, new: str) -> None:
    found = rem.search("fedavg", around=0.1, out=tmp_path / "s", **SMALL)
    plan = found.folder / COMPARISON
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=r"its search does not describe|not a search"):
        _ = SearchResult(Comparison(found.folder)).tried


def test_the_grid_of_values_is_rounded_and_keeps_the_guess() -> None:
    from remanence.sweeps.search import SearchSpace

    space = SearchSpace({}, {}, "fedavg", [0], "local.lr", 8e-5)
    assert [space.value_at(position) for position in (-2, -1, 0, 1, 2)] == [
        2.53e-5,
        4.5e-5,
        8e-5,
        1.42e-4,
        2.53e-4,
    ]
    assert np.isclose(space.value_at(8) or 0, 8e-3)
