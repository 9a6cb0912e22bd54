"""benchmarks/history.py: intervals worked by hand, verdicts, which lines are compared, errors."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench.scripts import load_script
from scipy.stats import mannwhitneyu

from remanence.bench import JOBS, runner
from remanence.core.errors import InputError
from remanence.engines.autotune import EngineChoice

history = load_script("history")
Interval = history.Interval


def line(commit: str, job: str = "B", **seconds: list[float]) -> dict[str, Any]:
    machine = {"device_name": "CPU X", "cores": 2, "torch": "2.13.0", "precision": "fp32"}
    return {"commit": commit, "job": job, **machine, "seconds": seconds}


def test_the_interval_of_two_by_two_hand_worked_samples() -> None:
    """Four turns each allow one order of 70 on either side, 2/70 < 0.05 < 4/70: the interval is
    the whole range of the 16 ratios: nine times 2, three times 3, three times 1, and once 3/2.
    """
    interval = history.shift([1, 1, 1, 2], [2, 2, 2, 3])
    assert interval == Interval(2, 1, pytest.approx(3))


def test_five_turns_leave_out_two_ratios_on_either_side() -> None:
    """1, ..., 5 ones before; after 1, 2, 4, 8, 16: 25 ratios, five of each. U is at most 2 in
    4 orders of 252 (8/252 < 0.05), at most 3 in 7 (14/252 > 0.05): the third smallest ratio is 1,
    the third largest 16, and the median 4.
    """
    interval = history.shift([1] * 5, [1, 2, 4, 8, 16])
    assert interval == Interval(pytest.approx(4), 1, pytest.approx(16))
    # of 462 orders of six and five, 7 have U <= 3 and 12 have U <= 4: 14/462 < 0.05 < 24/462
    assert history.last_rank(6, 5) == 3


def test_three_turns_are_too_few() -> None:
    """One order of 20 on either side is already 2/20 > 0.05."""
    assert history.shift([1, 1, 1], [9, 9, 9]) is None
    assert history.decide(None, None) == history.FEW


@pytest.mark.parametrize(("n", "m"), [(4, 4), (5, 7), (9, 4), (15, 15)])
def test_the_interval_belongs_to_the_test_of_mann_and_whitney(n: int, m: int) -> None:
    """scipy's exact p-value of U is at most 0.05 at the last rank, and above it at the next."""
    rank = history.last_rank(n, m)
    assert sum(history.count_orders(n, m)) == math.comb(n + m, n)

    def p_value(u: int) -> float:
        """Samples without ties in which exactly u pairs have a larger first number."""
        first, rest = list(range(n)), u
        for i in reversed(range(n)):  # each of the first sample overtakes up to m of the second
            step = min(m, rest)
            first[i], rest = i + step * n, rest - step
        low = [(value - i) // n for i, value in enumerate(first)]
        x = [overtaken + (i + 1) / (n + 2) for i, overtaken in enumerate(low)]
        y = [j + 1.0 for j in range(m)]
        done = mannwhitneyu(x, y, method="exact")
        assert done.statistic == u
        return float(done.pvalue)

    assert p_value(rank) <= 0.05 < p_value(rank + 1)


@pytest.mark.parametrize(
    ("ours", "control", "verdict"),
    [
        (Interval(1.10, 1.05, 1.15), None, "slower"),
        (Interval(0.90, 0.85, 0.95), None, "faster"),
        (Interval(1.02, 0.99, 1.05), None, "within noise"),
        # the machine became slower by as much
        (Interval(1.10, 1.05, 1.15), Interval(1.08, 1.02, 1.12), "within noise"),
        (Interval(1.10, 1.05, 1.15), Interval(1.01, 0.98, 1.04), "slower"),
        # slower than before, and less so than the control: not an effect of the commit
        (Interval(0.90, 0.85, 0.95), Interval(0.80, 0.78, 0.82), "within noise"),
        (Interval(0.70, 0.68, 0.72), Interval(0.80, 0.78, 0.82), "faster"),
    ],
)
def test_verdicts(ours: Any, control: Any, verdict: str) -> None:
    assert history.decide(ours, control) == verdict


def test_two_commits_are_compared_job_by_job_and_lines_are_put_together() -> None:
    """B takes twice as long, and its lower bound is as before; A is in one commit only."""
    four = [1.0, 1.1, 1.2, 1.3]
    lines = [
        line("aaa1", ours=four[:2], plain=[5.0] * 2, lower_bound=[2.0, 2.1]),
        line("aaa1", ours=four[2:], plain=[5.0] * 2, lower_bound=[2.2, 2.3]),
        line("aaa1", "A", ours=four),
        line("bbb1", ours=[2 * s for s in four], plain=[9.0] * 4, lower_bound=[2.0, 2.1, 2.2, 2.3]),
    ]
    (change,) = history.compare(lines, "aaa", "b")
    assert (change.job, change.before, change.after) == ("B", 1.15, 2.3)
    assert change.ours.ratio == pytest.approx(2)
    # the plain loop's 1.8 is not the control where there is a lower bound
    assert change.control.ratio == pytest.approx(1)
    # 2.0/1.3 = 1.54 is above the control's 2.3/2.0 = 1.15
    assert change.verdict == "slower"
    # one line of two turns against one of four
    assert history.compare(lines, ":1", ":4")[0].verdict == history.FEW


@pytest.mark.parametrize(
    ("before", "after", "jobs", "sentence"),
    [
        (":3", ":1", [], r"no job in common"),
        ("aaa", "bbb", ["A"], r"job A is not in the lines of both aaa and bbb"),
        ("aaa", "ccc", [], r"CPU X, 2 cores, torch 2.13.0, fp32 before and with CPU X, 2 cores,"),
        ("aaa", "zzz", [], r"no line has a commit that begins with zzz: give one of aaa1, bbb1"),
        ("", "aaa", [], r"several commits begin with"),
        (":0", "aaa", [], r"there is no line :0: give :1 to :4"),
        (":x", "aaa", [], r"there is no line :x"),
    ],
)
def test_errors(before: str, after: str, jobs: list[str], sentence: str) -> None:
    lines = [
        line("aaa1", ours=[1.0] * 4),
        line("bbb1", ours=[1.0] * 4),
        line("aaa1", "A", ours=[1.0]),
        line("ccc1", ours=[1.0] * 4) | {"precision": "tf32"},
    ]
    with pytest.raises(InputError, match=sentence):
        history.compare(lines, before, after, jobs)


def test_lines_of_real_runs_are_appended_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {
        "data.name": "synthetic(samples=60, classes=4, shape='1x16x16', test=0.2)",
        "clients.count": 4,
        "clients.sample": 3,
        "model": "lenet",
    }
    job = JOBS["G"]
    monkeypatch.setitem(JOBS, "A", type(job)("A", "tiny", {**JOBS["A"].settings, **tiny}))
    monkeypatch.setattr(
        runner,
        "choose_engine",
        lambda task, work, workload: EngineChoice("sequential", 1, "sequential: as asked"),
    )
    monkeypatch.setattr("remanence.bench.baselines.compiler_works", lambda device: False)
    file = tmp_path / "history.jsonl"
    for commit in ("aaa1", "bbb2"):
        monkeypatch.setattr(history, "current_commit", lambda commit=commit: commit)
        arguments = ["add", "A", "--repeat", "4", "--device", "cpu", "--file", str(file)]
        assert history.main(arguments) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [(one["commit"], one["job"]) for one in lines] == [("aaa1", "A"), ("bbb2", "A")]
    assert {name: len(turns) for name, turns in lines[0]["seconds"].items()} == {
        "ours": 4,
        "plain": 4,
        "lower_bound": 4,
    }
    capsys.readouterr()
    assert history.main(["compare", "aaa", "bbb", "--file", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| A | ")
    assert history.main(["show", "--file", str(file)]) == 0
    assert "median of 4" in capsys.readouterr().out
    assert history.main(["show", "--file", str(tmp_path / "none")]) == InputError.exit_code


def test_a_line_needs_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(history, "TREE", tmp_path)
    with pytest.raises(InputError, match="is no git repository"):
        history.current_commit()


def test_doctests() -> None:
    done = doctest.testmod(history)
    assert done.attempted > 0
    assert done.failed == 0
