"""`remanence reproduce` at the smallest scale: run, continue, add rows, reject, and write pages."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from remanence.core.errors import OUT_OF_TIME, InputError, Stopped
from remanence.data import DATASETS, downloads, load_dataset
from remanence.recipes import list_recipes
from remanence.recipes.estimate import describe_plan
from remanence.recipes.figure_data import FIGURE
from remanence.recipes.loader import PAPERS, load_recipe
from remanence.recipes.outcomes import OUTCOME, name_outcome, read_outcome
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import SCALES
from remanence.recipes.reproduce import PAGE, TABLE, check_recorded_rounds, plan_result, reproduce
from remanence.recipes.results_pages import write_results
from remanence.results.run import RUNS, Comparison
from remanence.rounds.time_limit import TimeLimit


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMANENCE_DATA", raising=False)


def stamps(folder: Path) -> dict[str, int]:
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in sorted((folder / RUNS).glob("*/metrics.jsonl"))
    }


def test_a_table_goes_on_and_grows(tmp_path: Path) -> None:
    out = tmp_path / "t"
    first = reproduce("wsm/table-3.2", out, scale="smoke", only=["FedAvg"], report=False)
    assert [row.label for row in first.plan.rows] == ["FedAvg"]
    before = stamps(out)
    again = reproduce(
        "wsm/table-3.2", out, scale="smoke", only=["FedAvg", "FedAvg+WSM"], report=False
    )
    after = stamps(out)
    assert {name: after[name] for name in before} == before  # what was done is not done again
    assert len(after) == 2
    assert again.ours["FedAvg", "CIFAR-10"] == first.ours["FedAvg", "CIFAR-10"]
    more = reproduce("wsm/table-3.2", out, scale="smoke", only=["FedAvg"], seeds=2, report=False)
    assert more.ours["FedAvg", "CIFAR-10"].deviation is not None
    assert len(Comparison(out).runs) == 3
    assert json.loads((out / OUTCOME).read_text())["seeds"] == 2
    assert "| FedAvg | 0.684 |" in (out / PAGE).read_text()
    assert (out / TABLE).read_text().count("\n") == 3


def test_a_stopped_result_goes_on_at_its_round(tmp_path: Path) -> None:
    class Now(TimeLimit):
        def passed(self) -> bool:
            return self.rounds >= 2

    whole = reproduce("wsm/table-3.3", tmp_path / "whole", scale="smoke", report=False)
    with pytest.raises(Stopped, match="go on with the same command") as stop:
        reproduce(
            "wsm/table-3.3", tmp_path / "cut", scale="smoke", time_limit=Now(1.0), report=False
        )
    assert stop.value.exit_code == OUT_OF_TIME
    assert "1 of 1 runs not finished" in (tmp_path / "cut" / PAGE).read_text()
    assert json.loads((tmp_path / "cut" / OUTCOME).read_text())["runs"] == 0
    assert (
        reproduce("wsm/table-3.3", tmp_path / "cut", scale="smoke", report=False).ours == whole.ours
    )


def test_a_measure_from_round_to_round_is_refused_before_rounds_are_skipped(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        InputError,
        match=r"global_forgetting compares every round with the one before, and FedAvg, forgotten"
        r" in a round would record every 5 rounds: set record\.every=1",
    ):
        reproduce("flashback/figure-5", tmp_path / "r", scale="smoke", changes={"record.every": 5})
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_no_recipe_skips_rounds_that_its_measures_need(scale: str) -> None:
    for name in list_recipes():
        check_recorded_rounds(make_plan(load_recipe(name), scale))


def test_another_result_does_not_mix_in(tmp_path: Path) -> None:
    reproduce("wsm/figure-a.1", tmp_path / "r", scale="smoke", report=False)
    for changed in (
        {"scale": "smoke", "changes": {"local.batch_size": 8}},
        {"scale": "smoke", "substitute_data": True},
    ):
        with pytest.raises(InputError, match="another result, scale or setting"):
            reproduce("wsm/figure-a.1", tmp_path / "r", report=False, **changed)  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="exists and is not empty"):
        reproduce("wsm/figure-a.1", tmp_path / "full", scale="smoke", report=False)


def test_a_figure_has_its_data_and_the_report(tmp_path: Path) -> None:
    reproduce("wsm/figure-2.2", tmp_path / "f", scale="smoke")
    lines = (tmp_path / "f" / FIGURE).read_text().splitlines()
    assert lines[0] == "row,column,round,model,data,before,after,forgotten"
    assert "<title>wsm/figure-2.2, scale smoke" in (tmp_path / "f" / "report.html").read_text()
    assert len(lines) == 1 + 2 * 3 * 3  # two methods, three clients' models on three clients' data
    assert (tmp_path / "f" / "report.html").stat().st_size > 10_000


def test_a_decentralized_row(tmp_path: Path) -> None:
    done = reproduce(
        "hast/table-a.8",
        tmp_path / "h",
        scale="smoke",
        only=["Label drift, 2 random", "accuracy, HAST", "drop, HAST"],
        report=False,
    )
    assert len(done.plan.runs) == 1
    accuracy = done.ours["Label drift, 2 random", "accuracy, HAST"].value
    assert accuracy is not None
    assert 0 <= accuracy <= 100  # in percent, as the thesis prints it


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_runs_at_smoke(name: str, tmp_path: Path) -> None:
    done = reproduce(name, tmp_path / "s", scale="smoke", report=False)
    known = [number for number in done.ours.values() if number.known]
    assert len(known) >= len(done.plan.rows) * len(done.plan.columns) / 2
    assert {verdict.word for verdict in done.verdicts} <= {"not tested"}
    assert (tmp_path / "s" / FIGURE).exists() == (done.plan.recipe.kind == "figure")
    if done.plan.recipe.kind == "figure":
        assert (tmp_path / "s" / FIGURE).read_text().count("\n") > len(done.plan.rows)


def test_the_error_for_missing_data_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"needs cifar10, which is not in the data folder .* remanence data fetch cifar10",
    ):
        plan_result("wsm/table-3.2", scale="gpu")
    with pytest.raises(InputError, match=r"needs svhn.*--substitute-data: MNIST"):
        plan_result("fedwavg/table-4", scale="desk", data_dir=str(tmp_path))
    (tmp_path / "mnist").mkdir()
    plan = plan_result(
        "fedwavg/table-4", scale="desk", data_dir=str(tmp_path), substitute_data=True
    )
    assert {(run.substitute, run.experiment.data.name) for run in plan.runs} == {("svhn", "mnist")}
    with pytest.raises(InputError, match="unknown scale 'huge'"):
        plan_result("wsm/table-3.2", scale="huge")


def test_a_plan_can_be_printed_without_the_data(tmp_path: Path) -> None:
    text = describe_plan(
        plan_result("wsm/table-3.2", scale="gpu", data_dir=str(tmp_path), dry_run=True)
    )
    assert "FedAvg+WSM, CIFAR-10: 80 rounds, about" in text
    assert (
        "required, cifar10 is not in the data folder: get it with remanence data fetch cifar10"
    ) in text
    (tmp_path / "mnist").mkdir()
    text = describe_plan(
        plan_result("fedwavg/table-1", scale="desk", data_dir=str(tmp_path), dry_run=True)
    )
    assert "Federated, MNIST: 3 rounds" in text
    assert "Federated, CIFAR-10" not in text
    assert "left out, cifar10 is not in the data folder" in text


def test_a_result_at_two_lengths_stands_twice_on_its_page(tmp_path: Path) -> None:
    """The longer one first, the remark once; two folders with the same settings are rejected before
    anything is written.
    """
    for rounds in (1, 2):
        only = ["FedAvg, batch norm, lr 0.05"]
        reproduce(
            "wsm/table-3.3",
            tmp_path / str(rounds),
            scale="smoke",
            only=only,
            changes={"rounds": rounds},
            report=False,
        )
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    with pytest.raises(
        InputError, match=r"1 and .*copy hold the same result with the same settings"
    ):
        write_results([tmp_path / "1", tmp_path / "copy"], tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "remarks.toml").write_text('"wsm/table-3.3" = "Both are short."')
    write_results([tmp_path / "1", tmp_path / "2"], tmp_path / "docs")
    text = (tmp_path / "docs" / "wsm.md").read_text()
    assert (
        0
        < text.index("--set rounds=2")
        < text.index("--set rounds=1")
        < text.index("Both are short.")
    )
    assert text.count("Both are short.") == 1
    recipe = load_recipe("wsm/table-3.3")
    untested = re.findall(r"\| table-3\.3 \| .* \| \*\*not tested\*\* \|", text)
    assert len(untested) == len(recipe.claims)  # smoke tests no claim
    costs = text.partition("## What was run, and what the rest would take")[2]
    assert (
        "| wsm/table-3.3: Batch norm against group norm, with and without WSM | smoke, 2"
        " rounds; smoke, 1 round | 4 runs of 300 rounds, " in costs
    )
    assert (
        "| wsm/table-3.2: FedAvg, SCAFFOLD and FedProx with and without WSM | not run | 6 runs"
        " of 80 rounds, "
    ) in costs
    assert costs.count("\n| wsm/") == sum(name.startswith("wsm/") for name in list_recipes())


def test_a_claim_has_one_verdict_from_the_longest_run_as_published(tmp_path: Path) -> None:
    """Of 8,000 rounds: 900, 4,000 and 300 as published, and 8,000 with a changed setting."""
    rows = ["FedAvg, batch norm, lr 0.05", "FedAvg+WSM, batch norm, lr 0.05"]
    options = {"scale": "smoke", "only": rows, "report": False}
    changes: list[dict[str, Any]] = [
        {"rounds": 1, "engine": "sequential", "record.every": 1},
        {"rounds": 2},
        {"rounds": 3, "local.drop_last": True},
        {"rounds": 4},
    ]
    rounds, better = (900, 4000, 8000, 300), (0.6, 0.4, 0.6, 0.4)
    for place, change in enumerate(changes):
        out = tmp_path / str(place)
        reproduce("wsm/table-3.3", out, changes=change, **options)  # type: ignore[arg-type]
        about = json.loads((out / OUTCOME).read_text())
        values = {rows[0]: 0.5, rows[1]: better[place]}
        about["numbers"] = [
            [row, column, values[row], None, "", rounds[place], 1]
            for row, column, *_ in about["numbers"]
        ]
        (out / OUTCOME).write_text(json.dumps(about | {"scale": "desk"}))

    def line_of(*places: int) -> list[str]:
        write_results([tmp_path / str(place) for place in places], tmp_path / "docs")
        text = (tmp_path / "docs" / "wsm.md").read_text()
        # with several results each is listed with its numbers, and the table has one verdict
        assert text.count("The claims in these runs:") == (len(places) if len(places) > 1 else 0)
        (line,) = re.findall(r"\| table-3\.3 \| .*consistently performs best.*", text)
        return [cell.strip() for cell in line.strip("|").split("|")][2:]

    text = ["**not so far**", "-10.0 points", "+6.0 points", "0 of 1, of 24"]
    assert line_of(0, 1, 2) == [*text, "4,000 of 8,000 (50%)", "1", "desk"]
    assert line_of(0)[0] == "**holds so far**"
    changed = line_of(2)
    assert (changed[0], changed[-1]) == ("**holds so far**", "desk, local.drop\\_last=true")
    assert line_of(3)[0] == "**too early to tell**"
    assert line_of(3, 2) == changed  # 300 rounds as published are too few to tell
    stored = [
        json.loads((folder / OUTCOME).read_text())["claims"][0]["verdict"]
        for folder in (tmp_path / "docs" / "outcomes").iterdir()
    ]
    assert sorted(stored) == ["holds so far", "holds so far", "not so far", "too early to tell"]


def test_the_index_has_a_row_for_every_paper(tmp_path: Path) -> None:
    (tmp_path / "remarks.toml").write_text(
        'wsm = "WSM helps\\nearly on."\nqueue = "TCE comes next."'
    )
    *pages, index = write_results([], tmp_path)
    assert [page.stem for page in pages] == list(PAPERS)
    text = index.read_text()
    claims = sum(len(load_recipe(n).claims) for n in list_recipes() if n.startswith("wsm/"))
    assert f", 2022 | 0 | 0 | 0 | 0 | 0 | 0 | {claims} | WSM helps early on. |" in text
    assert text.count(".md): ") == len(PAPERS)
    assert "WSM helps\nearly on." in pages[0].read_text()
    assert text.endswith("## Runs at published length\n\nTCE comes next.\n")


def test_what_is_absent_is_what_readers_do_not_find(tmp_path: Path) -> None:
    for name in downloads.FOLDERS:
        assert downloads.is_missing(name, tmp_path)
        assert downloads.is_missing(name, None)
        if name in DATASETS:
            with pytest.raises(InputError, match="was not found") as error:
                load_dataset(name, {}, tmp_path)
            assert all(f"{folder}/" in str(error.value) for folder in downloads.FOLDERS[name])
    (tmp_path / "PACS").mkdir()
    assert not downloads.is_missing("pacs", tmp_path)
    assert not downloads.is_missing("digits", None)


def test_pages_are_made_from_stored_outcomes(tmp_path: Path) -> None:
    done = reproduce("tce/table-2", tmp_path / "t", scale="smoke", report=False)
    read, about = read_outcome(tmp_path / "t")
    assert (read.ours, read.notes) == (done.ours, done.notes)
    assert read.verdicts == done.verdicts
    pages = write_results([tmp_path / "t"], tmp_path / "docs")
    assert [page.stem for page in pages] == [*PAPERS, "README"]
    text = (tmp_path / "docs" / "tce.md").read_text()
    assert "remanence reproduce tce/table-2 --scale smoke --out DIR" in text
    assert about["machine"] in text.replace("\\", "")
    assert re.search(
        r"\| tce/table-1: FedAvg with and without TCE .* \| not run \| 3 runs of 400 rounds, ", text
    )  # what was not run is named
    assert (
        len(
            re.findall(
                r"\n\| hast/\S+: .* \| not run \| ", (tmp_path / "docs" / "hast.md").read_text()
            )
        )
        == 15
    )
    assert re.search(
        r"\| figure-1 \| With TCE .* \| \*\*not tested\*\* \| - \| - \| 1 not run \| - \| - \| not run \|",
        text,
    )
    recipes = [load_recipe(name) for name in list_recipes() if name.startswith("tce/")]
    lines = re.findall(r"\n\| (?:table|figure)-\S+ \| .* \| \*\*", text)
    # every claim has its line, tested or not
    assert len(lines) == sum(len(recipe.claims) for recipe in recipes)
    (tmp_path / "docs" / "remarks.toml").write_text('"tce/table-2" = "Too short to tell."')
    (kept,) = (tmp_path / "docs" / "outcomes").iterdir()  # the numbers are kept beside the pages
    again = write_results([kept], tmp_path / "docs")
    assert again[1].read_text().replace("### Remarks\n\nToo short to tell.\n\n", "") == text
    (tmp_path / "docs" / "remarks.toml").write_text('"tce/table-9" = "?"')
    with pytest.raises(InputError, match="tce/table-9"):
        write_results([tmp_path / "t"], tmp_path / "docs")
    with pytest.raises(InputError, match=r"has no outcome\.json"):
        write_results([tmp_path], tmp_path / "docs")
    for content in ("{", "[]", '{"result": "tce/table-2"}'):
        (tmp_path / "t" / OUTCOME).write_text(content)
        with pytest.raises(InputError, match="damaged"):
            write_results([tmp_path / "t"], tmp_path / "docs")


def test_a_figure_uses_the_runs_of_its_table(tmp_path: Path) -> None:
    """Round 1, 70% and the end of the same training: the table trains, the figures do not, though
    their data folder is another.
    """
    rows = ["FedAvg, lr 0.1", "FedAvg+WSM, lr 0.1", "CIFAR-10"]
    table = tmp_path / "table"
    reproduce(
        "wsm/table-3.1", table, scale="smoke", only=rows, data_dir=str(tmp_path), report=False
    )

    class NoTraining(TimeLimit):
        def passed(self) -> bool:
            raise AssertionError("a run trains")

    limit, rounds = NoTraining(1.0), []
    for name in ("wsm/figure-a.1", "wsm/figure-2.2", "wsm/figure-a.2"):
        out = tmp_path / name.replace("/", "-")
        done = reproduce(
            name, out, scale="smoke", runs_from=[table], time_limit=limit, report=False
        )
        assert all(number.known for number in done.ours.values())
        with (out / FIGURE).open() as file:
            rounds.append({line["round"] for line in csv.DictReader(file)})
        assert not list((out / RUNS).glob("*/checkpoints"))
    assert rounds == [{"1"}, {"3"}, {"3"}]  # of 3 rounds: 70% is nearer to the last
    # the copies are runs of this folder: nothing is trained without the table, either
    again = reproduce(name, out, scale="smoke", time_limit=limit, report=False)
    assert again.ours == done.ours


def test_runs_with_other_settings_are_not_used(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    options = {"scale": "smoke", "only": ["FedAvg"], "report": False}
    one = reproduce("wsm/table-3.2", first, changes={"local.lr": 0.2}, **options)  # type: ignore[arg-type]
    two = reproduce("wsm/table-3.2", second, runs_from=[first], **options)  # type: ignore[arg-type]
    assert one.ours != two.ours
    with pytest.raises(InputError, match=r"has no runs to use: give a folder that remanence"):
        reproduce("wsm/table-3.2", tmp_path / "3", runs_from=[tmp_path], **options)  # type: ignore[arg-type]
    assert not (tmp_path / "3").exists()


STORED = Path(__file__).parents[2] / "docs" / "results" / "outcomes"


@pytest.mark.parametrize("folder", sorted(STORED.iterdir()), ids=lambda folder: folder.name)
def test_a_stored_number_says_what_it_rests_on(folder: Path) -> None:
    outcome, about = read_outcome(folder)
    assert folder.name == name_outcome(about)
    known = {place for place, number in outcome.ours.items() if number.known}
    assert known == set(outcome.bases)
    assert all(basis.rounds > 0 and basis.seeds > 0 for basis in outcome.bases.values())
    assert (folder / FIGURE).exists() == bool(outcome.plan.recipe.figure_kind)
