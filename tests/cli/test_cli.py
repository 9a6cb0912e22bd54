"""The command line in real processes: exit codes, one sentence for a mistake, no files left over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from remanence.cli.listing import TABLES
from remanence.cli.main import main
from remanence.cli.options import LISTS
from remanence.core.errors import INTERRUPTED, NOTHING_LEARNED, OUT_OF_TIME, TERMINATED
from remanence.experiment import build  # noqa: F401  (imported before the forks, since commands import it late)

QUICK = ["--data", "digits", "--clients", "5", "--rounds", "2", "--engine", "sequential"]


def remanence(
    *arguments: str, cwd: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"} | more.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "remanence", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=120,
        **more,
    )


def forked(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork of this process, which has imported torch already: ten times
    faster than a new process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _become_command([*arguments], cwd, out.fileno(), errors.fileno())
        _, status = os.waitpid(child, 0)
        outputs = []
        for file in (out, errors):
            file.seek(0)
            outputs.append(file.read().decode())
    return subprocess.CompletedProcess(list(arguments), os.waitstatus_to_exitcode(status), *outputs)


def _become_command(arguments: list[str], cwd: Path | None, out: int, errors: int) -> NoReturn:
    code = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (out, errors))
        os.environ["COLUMNS"] = "100"
        if cwd is not None:
            os.chdir(cwd)
        sys.argv = ["remanence", *arguments]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def test_run_report_evaluate_export_resume(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = remanence("run", "--method", "fedavg+wsm", *QUICK, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "round 2/2, accuracy" in done.stderr  # plain lines: there is no terminal
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert {"experiment.toml", "metrics.jsonl", "ledger.bin", "checkpoints", "report.html"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }

    again = remanence("run", *QUICK, "--out", out)
    assert again.returncode == 2
    assert "remanence resume" in again.stderr

    evaluated = remanence("evaluate", out, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert 0 <= json.loads(evaluated.stdout)["accuracy"] <= 1

    exported = remanence("export", out)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()

    resumed = remanence("resume", out, "--rounds", "3", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["results"][0]["last_round"] == 3


def test_a_run_that_learned_nothing_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """Said before the table, in JSON first, and in the report; resuming it says it again."""
    out = str(tmp_path / "run")
    done = forked("run", *QUICK, "--set", "round.weight_cap=1", "--out", out)
    assert done.returncode == NOTHING_LEARNED == 65
    assert done.stdout.startswith("Warning: fedavg learned nothing in 2 rounds, its model is the")
    assert (
        "round 1: no update could be used: every reply was rejected, most as weight" in done.stderr
    )
    again = forked("resume", out, "--json")
    assert again.returncode == NOTHING_LEARNED
    result = json.loads(again.stdout)
    assert next(iter(result)) == "warnings"
    assert result["warnings"][0].startswith("fedavg learned nothing in 2 rounds")
    assert result["results"][0]["learned_nothing"] == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<p class="first">Warning: fedavg learned nothing in 2 rounds' in page
    assert "LearnedNothing" not in done.stderr + again.stderr


def test_a_comparison_names_the_setting_that_learned_nothing(tmp_path: Path) -> None:
    done = forked(
        *("compare", "--methods", "fedavg", "--grid", "lr=0.1,1e30", "--select", "all"),
        *("--seeds", "2", *QUICK, "--out", str(tmp_path / "c"), "--json"),
    )
    assert done.returncode == NOTHING_LEARNED
    result = json.loads(done.stdout)
    assert [row["learned_nothing"] for row in result["results"]] == [0, 2]
    assert result["warnings"][0].startswith("fedavg, lr=1e+30 (seed 0 and 1) learned nothing")


def test_help_lists_the_exit_codes() -> None:
    text = " ".join(forked("--help").stdout.split())
    for code in (0, 1, 2, NOTHING_LEARNED, OUT_OF_TIME, INTERRUPTED, TERMINATED):
        assert f" {code} " in text


def test_compare_prints_a_table_and_stops_in_time(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    stopped = remanence(
        "compare",
        "--methods",
        "fedavg; fedavg+tce",
        *QUICK,
        "--seeds",
        "2",
        "--out",
        out,
        "--time-limit",
        "0.001",
    )
    assert stopped.returncode == 75
    assert f"remanence resume {out}" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    done = remanence("resume", out)
    assert done.returncode == 0, done.stderr
    assert "fedavg+tce" in done.stdout
    assert (tmp_path / "c" / "report.html").exists()


def test_a_search_prints_what_it_tried_and_goes_on(tmp_path: Path) -> None:
    command = ["search", "--method", "fedprox(mu=0.1)", "--around", "0.1", *QUICK]
    out = str(tmp_path / "s")
    stopped = forked(*command, "--out", out, "--time-limit", "0.001")
    assert stopped.returncode == OUT_OF_TIME
    assert f"remanence resume {out}" in stopped.stderr
    again = forked(*command, "--out", out, "--time-limit", "0.001")
    assert again.returncode == OUT_OF_TIME, again.stderr
    done = forked("resume", out)
    assert done.returncode == 0, done.stderr
    assert "* " in done.stdout
    assert "best local.lr" in done.stdout
    assert f"report: {out}/report.html" in done.stdout
    stored = json.loads((tmp_path / "s" / "search.json").read_text())
    printed = json.loads(forked(*command, "--out", out, "--json").stdout)
    assert printed["tried"] == stored["tried"]
    assert len(stored["tried"]) >= 11
    wrong = forked("search", "--around", "0", "--out", str(tmp_path / "w"))
    assert wrong.returncode == 2
    assert (
        wrong.stderr == "remanence: the search is around 0: give a guess above 0 and below 1e+100\n"
    )
    missing = forked("search")
    assert missing.returncode == 2
    assert "--around" in missing.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_ctrl_c_saves_and_exits_with_130(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "remanence",
        "run",
        "--data",
        "digits",
        "--clients",
        "5",
        "--rounds",
        "100000",
        "--engine",
        "sequential",
    ]
    child = subprocess.Popen(
        [*command, "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while (
        not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 2000)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "all saved" in errors
    assert "Traceback" not in errors
    saved = sorted((out / "checkpoints").glob("round-*"))[-1]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["round"] >= int(saved.name.removeprefix("round-"))


USAGE = {
    "unknown flag": (["run", "--clinets", "5"], "--clients"),
    "missing value": (["run", "--rounds"], "--rounds"),
    "not a whole number": (["run", "--rounds", "abc"], "--rounds"),
    "unknown command": (["lst"], "Did you mean 'list'?"),
    "missing argument": (["resume"], "Missing argument"),
    "unknown list": (["list", "methodss"], "did you mean methods?"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_a_usage_error_is_a_sentence(tmp_path: Path, kind: str) -> None:
    arguments, words = USAGE[kind]
    result = forked(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.count(words) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "unknown method": (["--method", "fedporx"], "did you mean fedprox"),
    "unknown option": (["--method", "fedprox(mux=1)"], "did you mean mu?"),
    "unknown model": (["--model", "mpl"], "did you mean mlp?"),
    "unknown data": (["--data", "digit"], "did you mean digits?"),
    "unknown partition": (["--partition", "diriclet"], "did you mean dirichlet"),
    "unknown optimizer": (["--optimizer", "sdg"], "did you mean sgd?"),
    "unknown key": (["--set", "local.bach=3"], "did you mean local.batch_size"),
    "wrong type": (["--set", "local.batch_size=many"], "a whole number"),
    "out of range": (["--batch-size", "0"], "at least 1"),
    "not a number": (["--lr", "fast"], "--lr"),
    "no value": (["--set", "local.batch_size"], "has no value"),
    "same slot twice": (["--method", "wsm+tce"], "wsm and tce cannot be combined"),
    "too many clients": (["--clients", "5000"], "5000"),
    "sample above the number of clients": (["--sample", "9", "--clients", "5"], "more than"),
    "model does not fit": (["--model", "lenet"], "too small"),
    "no such device": (["--device", "tpu"], "unknown device"),
    "missing data": (["--data", "cifar10", "--data-dir", "/nonexistent"], "cifar"),
    "no such file": (["nowhere.toml"], "no experiment file"),
    "broken expression": (["--method", "fedavg+"], "cannot read"),
    "code in an expression": (["--method", "fedavg(__import__('os'))"], "cannot read"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    arguments, words = MISTAKES[kind]
    result = forked("run", *arguments, "--out", str(tmp_path / "run"), cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wsm/table-3.9"], "did you mean wsm/table-3.3"),
        (["wsm/table-3.3", "--scale", "moon"], "unknown scale 'moon'"),
        (["wsm/table-3.3", "--scale", "smoke", "--only", "FedProx"], "has no row 'FedProx'"),
        (["wsm/table-3.3", "--scale", "smoke"], "--out is missing"),
    ],
)
def test_wrong_options_of_reproduce_are_reported_before_missing_ones(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = forked("reproduce", *arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_is_fast_and_lists_are_machine_readable() -> None:
    assert "compare" in remanence("--help").stdout
    for table in LISTS:
        entries = json.loads(forked("list", table, "--json").stdout)
        assert len(entries) >= 2
        assert all(entry["description"] and entry["name"] for entry in entries), table


def test_list_without_a_table_lists_the_tables() -> None:
    printed = forked("list").stdout.splitlines()
    assert [line.split()[2] for line in printed] == list(LISTS)
    assert json.loads(forked("list", "--json").stdout) == LISTS


def test_the_help_of_run_has_groups_and_defaults() -> None:
    shown = " ".join(forked("run", "--help").stdout.replace("│", " ").split())
    for words in ("Local training", "Recording", "otherwise dirichlet(alpha=0.1).", "Default: 32."):
        assert words in shown


def test_runs_without_a_folder_get_one_with_the_date(tmp_path: Path) -> None:
    command = ["run", "--method", "fedprox(mu=0.1)+wsm", *QUICK[:4], "--rounds", "1"]
    for _ in range(2):
        done = forked(*command, "--engine", "sequential", "--quiet", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "runs").iterdir())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-fedprox-mu=0\.1-wsm", first.name)
    assert second.name == f"{first.name}-2"
    assert (second / "report.html").exists()


@pytest.mark.parametrize(
    "methods",
    [
        ["fedavg, fedprox(mu=0.1)"],
        ["fedavg; fedprox(mu=0.1)"],
        ["fedavg", "fedprox(mu=0.1)"],
    ],
)
def test_methods_are_a_list_or_a_repeated_option(tmp_path: Path, methods: list[str]) -> None:
    named = [word for method in methods for word in ("--methods", method)]
    out = tmp_path / "c"
    done = forked("compare", *named, *QUICK, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    runs = {path.name for path in (out / "runs").iterdir()}
    assert runs == {"fedavg-seed0", "fedprox-mu=0.1-seed0"}


def test_a_comparison_with_an_estimate_can_be_resumed(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    automatic = [*QUICK[:-1], "auto"]
    made = forked("compare", "--methods", "fedavg", *automatic, "--out", out)
    assert re.search(r"engine .* about \d+ s of local training in all", made.stderr), made.stderr
    done = forked("resume", out)
    assert done.returncode == 0, done.stderr


def test_the_demo_compares_four_methods(tmp_path: Path) -> None:
    done = forked("demo", "--rounds", "1", "--out", str(tmp_path / "demo"), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["label"] for row in rows] == [
        "fedavg",
        "fedprox(mu=0.1)",
        "fedavg+tce",
        "fedavg+wsm",
    ]
    assert all(row["seeds"] == 3 and row["local_forgetting"] is not None for row in rows)
    assert (tmp_path / "demo" / "report.html").is_file()


def test_the_help_names_every_table() -> None:
    assert [*TABLES, "engines", "settings"] == list(LISTS)


def test_data_show_and_check() -> None:
    shown = forked(
        "data",
        "show",
        "--data",
        "digits",
        "--clients",
        "3",
        "--partition",
        "shards(per_client=2)",
        "--json",
    )
    counts = json.loads(shown.stdout)["label_counts"]
    assert len(counts) == 3
    drawn = forked("data", "show", "--data", "digits", "--clients", "3")
    assert drawn.stdout.count("client ") >= 3
    checked = forked("data", "check", "digits")
    assert "1438" in checked.stdout.replace(",", "")


def test_data_check_takes_files_and_folders_as_run_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 3)), y=np.arange(10) % 2)
    assert "Arrays of mine.npz" in forked("data", "check", str(tmp_path / "mine.npz")).stdout
    (tmp_path / "images").mkdir()
    wrong = forked("data", "check", str(tmp_path / "images"))
    assert wrong.returncode == 2
    assert "dataset 'folder'" in wrong.stderr
