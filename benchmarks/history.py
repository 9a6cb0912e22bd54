"""The history of `remanence bench`: one line for each job, machine and commit, and a comparison of
two commits that says which differences are noise.

    python benchmarks/history.py add [JOB ...] [--repeat 15] [--device cpu] [--precision fp32]
    python benchmarks/history.py show
    python benchmarks/history.py compare BEFORE AFTER [--jobs A B]

BEFORE and AFTER are commits (their first letters suffice), or lines of the file: `:3` is the third.
Several lines of a commit, job and machine are put together. On a machine with other work, add lines
of both commits in turns: an interval from one process cannot know how processes differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, RemanenceError

TREE = Path(__file__).resolve().parents[1]
FILE = TREE / "benchmarks" / "history.jsonl"
# what two lines must have in common
MACHINE = ("device_name", "cores", "torch", "precision")
# work that no commit changes, measured in the same turns: the first that a job has
CONTROLS = ("lower_bound", "plain")
LEVEL = 0.95
FEW = "too few turns"


@dataclass(frozen=True)
class Interval:
    """After divided by before: an estimate and its 95% interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Change:
    """How a job's time changed between two commits."""

    job: str
    before: float
    after: float
    ours: Interval | None
    control: Interval | None
    verdict: str


def shift(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Hodges and Lehmann's estimate of the ratio of two samples of times, with the interval that
    belongs to the test of Mann and Whitney; None where the samples are too small for it.

    The estimate is the median of all ratios of a time after and a time before.

    >>> shift([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    Interval(ratio=2.0, low=2.0, high=2.0)
    """
    rank = last_rank(len(before), len(after))
    if rank is None:
        return None
    logs = sorted(math.log(b / a) for a in before for b in after)
    return Interval(
        *(math.exp(value) for value in (statistics.median(logs), logs[rank], logs[-1 - rank]))
    )


def last_rank(n: int, m: int) -> int | None:
    """The largest u such that Mann and Whitney's U of equal distributions is at most u in at most
    (1 - LEVEL) / 2 of all orders of n and m numbers; None if even 0 is too frequent.

    >>> last_rank(3, 3), last_rank(4, 4), last_rank(5, 5)
    (None, 0, 2)
    """
    allowed, orders, last = (1 - LEVEL) / 2 * math.comb(n + m, n), 0, None
    for u, count in enumerate(count_orders(n, m)):
        orders += count
        if orders > allowed:
            return last
        last = u
    return last


def count_orders(n: int, m: int) -> list[int]:
    """In how many orders of n and m numbers U is 0, 1, 2, ...: the coefficients of the Gaussian
    binomial, prod (1 - q^(m+i)) / (1 - q^i) for i = 1..n.

    >>> count_orders(2, 2)
    [1, 1, 2, 1, 1]
    """
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return counts


def decide(ours: Interval | None, control: Interval | None) -> str:
    """A job is slower if its interval lies above 1 and above the control's, and faster if it lies
    below both: what the control did as well, the machine did.
    """
    if ours is None:
        return FEW
    still = control or Interval(1, 1, 1)
    if ours.low > max(1.0, still.high):
        return "slower"
    return "faster" if ours.high < min(1.0, still.low) else "within noise"


def compare(
    lines: Sequence[dict[str, Any]], before: str, after: str, jobs: Sequence[str] = ()
) -> list[Change]:
    """All jobs that both sides have, on every machine that both have.

    Raises:
        InputError: A side has no lines, both have no job in common, or a job's lines are from
            different machines, versions of torch or precisions.
    """
    sides = [select(lines, name) for name in (before, after)]
    shared = [
        job
        for job in dict.fromkeys(line["job"] for line in sides[0])
        if any(line["job"] == job for line in sides[1]) and (not jobs or job in jobs)
    ]
    if missing := [job for job in jobs if job not in shared]:
        raise InputError(
            f"job {missing[0]} is not in the lines of both {before} and {after}: add the line that"
            " is missing"
        )
    if not shared:
        raise InputError(f"{before} and {after} have no job in common: add a line for one of both")
    changes = []
    for job in shared:
        grouped = [group(side, job) for side in sides]
        machines = [machine for machine in grouped[0] if machine in grouped[1]]
        if not machines:
            first, second = (describe(next(iter(by_machine))) for by_machine in grouped)
            raise InputError(
                f"job {job} was measured with {first} before and with {second} after: compare"
                " lines of one machine, version of torch and precision"
            )
        changes += [change(job, grouped[0][m], grouped[1][m]) for m in machines]
    return changes


def select(lines: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The line `:3`, or all lines of a commit."""
    if name.startswith(":"):
        number = int(name[1:]) if name[1:].isdecimal() else 0
        if not 1 <= number <= len(lines):
            raise InputError(f"there is no line {name}: give :1 to :{len(lines)}")
        return [lines[number - 1]]
    found = [line for line in lines if line["commit"].startswith(name)]
    commits = dict.fromkeys(line["commit"] for line in found)
    if len(commits) != 1:
        known = ", ".join(dict.fromkeys(line["commit"][:9] for line in lines)) or "none"
        problem = "several commits begin" if commits else "no line has a commit that begins"
        raise InputError(f"{problem} with {name}: give one of {known}")
    return found


def group(lines: Sequence[dict[str, Any]], job: str) -> dict[tuple[Any, ...], dict[str, list[Any]]]:
    """A job's turns by machine. -> {machine: {contender: seconds}}"""
    turns: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for line in lines:
        if line["job"] == job:
            mine = turns.setdefault(tuple(line[name] for name in MACHINE), {})
            for contender, seconds in line["seconds"].items():
                mine.setdefault(contender, []).extend(seconds)
    return turns


def change(job: str, before: dict[str, list[float]], after: dict[str, list[float]]) -> Change:
    ours = shift(before["ours"], after["ours"])
    control = next((name for name in CONTROLS if name in before and name in after), None)
    still = shift(before[control], after[control]) if control else None
    medians = (statistics.median(turns["ours"]) for turns in (before, after))
    return Change(job, *medians, ours, still, decide(ours, still))


def describe(machine: tuple[Any, ...]) -> str:
    name, cores, torch, precision = machine
    return f"{name}, {cores} cores, torch {torch}, {precision}"


def make_lines(results: Sequence[dict[str, Any]], commit: str, load: float) -> list[dict[str, Any]]:
    """The lines of results of `run_jobs`."""
    return [
        {
            "commit": commit,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "job": result["job"],
            **{name: result[name] for name in MACHINE},
            "system": result["system"],
            "python": result["python"],
            "load": round(load, 2),
            "engine": result["engine"],
            "threads": result["threads"],
            "peak_memory_bytes": result["peak_memory_bytes"],
            "seconds": {
                name: [float(f"{turn:.5g}") for turn in turns]
                for name, turns in result["all_seconds"].items()
            },
        }
        for result in results
    ]


def current_commit() -> str:
    """The commit that is checked out.

    Raises:
        InputError: `src` differs from it, or there is no repository.
    """
    git = ("git", "-C", str(TREE))
    try:
        commit, changed = (
            subprocess.run([*git, *what], capture_output=True, text=True, check=True).stdout.strip()
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "src"))
        )
    except (OSError, subprocess.CalledProcessError):
        raise InputError(f"{TREE} is no git repository: a line needs a commit") from None
    if changed:
        raise InputError("src has changes that are not committed: commit them, then measure")
    return commit


def read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise InputError(f"{file} does not exist: measure with `history.py add` first")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def add(options: argparse.Namespace) -> None:
    from remanence.bench import render, run_jobs

    commit, load = current_commit(), os.getloadavg()[0]
    for job in options.jobs or [None]:  # a job at a time, so that what was measured is kept
        results = run_jobs(
            [job] if job else [],
            device=options.device,
            precision=options.precision,
            repeat=options.repeat,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        with options.file.open("a") as file:
            for line in make_lines(results, commit, load):
                if not job or line["job"] == job:
                    print(json.dumps(line), file=file)
        print(render(results), flush=True)


def show(options: argparse.Namespace) -> None:
    for number, line in enumerate(read(options.file), 1):
        print(
            f":{number}  {line['commit'][:9]}  {line['date']}  {line['job']:10s}"
            f"  {statistics.median(line['seconds']['ours']):.4g} s, median of"
            f" {len(line['seconds']['ours'])}  {describe(tuple(line[name] for name in MACHINE))}"
        )


def show_comparison(options: argparse.Namespace) -> None:
    changes = compare(read(options.file), options.before, options.after, options.jobs)
    print("| job | before, s | after, s | ratio (95%) | ratio of the control | verdict |")
    print("|---|--:|--:|---|---|---|")
    for one in changes:
        print(
            f"| {one.job} | {one.before:.4g} | {one.after:.4g} | {one.ours or '-'} |"
            f" {one.control or '-'} | {one.verdict} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    adding = commands.add_parser("add", help="measure the checked-out commit and append lines")
    adding.add_argument("jobs", nargs="*", metavar="JOB", help="default: all that fit the device")
    adding.add_argument("--device", default="auto")
    adding.add_argument("--precision", default="fp32")
    adding.add_argument("--repeat", type=int, default=15, help="turns of each contender")
    showing = commands.add_parser("show", help="list the lines")
    comparing = commands.add_parser("compare", help="compare two commits or lines")
    comparing.add_argument("before", metavar="BEFORE")
    comparing.add_argument("after", metavar="AFTER")
    comparing.add_argument("--jobs", nargs="+", default=[], metavar="JOB")
    for command, action in ((adding, add), (showing, show), (comparing, show_comparison)):
        command.add_argument("--file", type=Path, default=FILE, help="default: %(default)s")
        command.set_defaults(action=action)
    options = parser.parse_args(arguments)
    try:
        options.action(options)
    except RemanenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
