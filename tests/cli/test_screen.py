"""What the commands print, and how much of it: --quiet, --verbose, log files, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.test_cli import QUICK, forked

from remanence.cli.options import FORMATS
from remanence.config import FLAGS, all_settings
from remanence.core.log_file import LOG
from remanence.exports import FORMATS as MODELS
from remanence.exports import TRACKERS


@pytest.mark.parametrize("flags", [[], ["-q"], ["--quiet", "--quiet"], ["-qq"]])
def test_quiet_hides_progress_and_twice_everything(tmp_path: Path, flags: list[str]) -> None:
    done = forked("run", *QUICK, *flags, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0
    assert bool(done.stderr) is (not flags)
    table = "accuracy %" in done.stdout and "report: r/report.html" in done.stdout
    assert table is (flags in ([], ["-q"]))
    assert bool(done.stdout) is table
    assert "round 2/2, accuracy" in (tmp_path / "r" / LOG).read_text()


def test_the_log_of_a_comparison_has_all_its_runs(tmp_path: Path) -> None:
    done = forked("compare", "--methods", "fedavg; fedavg+wsm", *QUICK, "--out", "c", cwd=tmp_path)
    text = (tmp_path / "c" / LOG).read_text()
    for shown in done.stderr.splitlines():
        assert shown in text
    assert "[1/2] fedavg, seed 0: round 1/2" in text
    assert "[2/2] fedavg+wsm, seed 0: round 2/2" in text
    assert "left in all" in text
    assert not (tmp_path / "c" / "runs" / "fedavg-seed0" / LOG).exists()


def test_the_engine_is_named_in_plain_words(tmp_path: Path) -> None:
    done = forked("run", "--rounds", "1", "--clients", "4", "--out", "r", cwd=tmp_path)
    first = done.stderr.splitlines()[0]
    assert first.startswith("Using engine '")
    assert " ms per local step" in first


def test_a_folder_in_use_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    flags = ("--rounds", "1", "--clients", "4", "--out", "r")
    assert forked("run", *flags, "-qq", cwd=tmp_path).returncode == 0
    again = forked("run", *flags, cwd=tmp_path)
    assert again.returncode == 2
    assert len(again.stderr.splitlines()) == 1
    assert "r holds an earlier run: finish it with remanence resume" in again.stderr
    assert "--rounds extends a finished one" in again.stderr


def test_the_method_is_checked_without_an_output_folder(tmp_path: Path) -> None:
    done = forked("run", "--method", "fedavgg", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "unknown method 'fedavgg'" in done.stderr


def test_every_format_is_in_the_help() -> None:
    assert {*MODELS, *TRACKERS} == set(FORMATS)
    help_text = forked("export", "--help").stdout
    assert all(name in help_text for name in FORMATS)


def test_every_setting_is_listed_with_its_default() -> None:
    lines = forked("list", "settings").stdout
    for key in all_settings():
        assert f"\n{key}" in f"\n{lines}"
    assert "local.batch_size = 32" in lines
    assert "Flag: --batch-size." in lines
    assert lines.count("Flag: --") == len(FLAGS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("remanence comp", "compare"),
        ("remanence run --batch", "--batch-size"),
        ("remanence list meth", "methods"),
        ("remanence export r --format ten", "tensorboard"),
    ],
)
def test_a_shell_completes(words: str, expected: str) -> None:
    code = "from remanence.cli.main import main; import sys; sys.argv = ['remanence']; main()"
    environment = os.environ | {
        "_REMANENCE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout.split(), done.stdout + done.stderr
