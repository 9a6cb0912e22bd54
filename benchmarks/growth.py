"""How seconds a round and peak memory grow: with clients, parameters, classes, and runs in one stack.

    python benchmarks/growth.py OUT                      # about ten minutes on two cores
    python benchmarks/growth.py OUT --only clients
    python benchmarks/growth.py OUT --quick              # small sizes, less than a minute

Every point is an experiment on a synthetic table of 32 features, in a process of its own and with a
limit of time. Seconds a round are the median of the rounds after the first, with evaluation, records
and checkpoints; the peak is that of the whole process, with making the data and the clients. Prints
a table and writes OUT/growth.csv and OUT/growth.png. An exponent is the slope of the upper half of
the sizes on logarithmic axes: 0 does not grow, 1 grows as the size does.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remanence.bench.machine import peak_of_process
from remanence.config import parse_experiment
from remanence.core.progress import NullProgress
from remanence.reports.theme import line_style
from remanence.rounds.loop import start_run
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.grid import plan_grid, start_comparison

FEATURES = 32
PLAIN: dict[str, Any] = {
    "data.partition": "iid",
    "data.validation": 0,
    "local.batch_size": 10,
    "threads": 1,
    "engine": "vectorized",
}


def table(train: int, test: int = 2_000, classes: int = 10) -> str:
    """A synthetic table with the given numbers of training and test examples."""
    share = test / (train + test)
    return (
        f"synthetic(samples={train + test}, classes={classes}, features={FEATURES}, test={share!r})"
    )


def with_clients(method: str) -> Callable[[int], dict[str, Any]]:
    """100 of `clients` clients a round, four examples each."""
    return lambda clients: {
        "method": method,
        "data.name": table(4 * clients),
        "clients.count": clients,
        "clients.sample": 100,
        "model": "mlp(hidden=64)",
    }


def with_parameters(parameters: int) -> dict[str, Any]:
    """Two of ten clients, one after the other, two steps each, with a network of this number of parameters
    in two layers. There are 200 test examples, on which it is evaluated after each round.
    """
    width = round(math.sqrt(parameters + 21.5**2) - 21.5)
    return {
        "data.name": table(1_000, 200),
        "clients.count": 10,
        "clients.sample": 2,
        "model": f"mlp(hidden='{width},{width}')",
        "local.steps": 2,
        "engine": "sequential",
    }


def with_classes(classes: int) -> dict[str, Any]:
    """Ten of 100 clients, 200 examples each, and `classes` classes."""
    return {
        "data.name": table(20_000, classes=classes),
        "clients.count": 100,
        "clients.sample": 10,
        "model": "mlp(hidden=64)",
    }


def with_runs(runs: int) -> dict[str, Any]:
    """Four of 100 clients, 40 examples each, in a stack that has room for `runs` seeds."""
    return {
        "data.name": table(4_000),
        "clients.count": 100,
        "clients.sample": 4,
        "model": "mlp(hidden=64)",
        "stack_size": 4 * runs,
    }


@dataclass(frozen=True)
class Sweep:
    """What grows, and how the settings follow from its size."""

    of: str
    line: str
    settings: Callable[[int], dict[str, Any]]
    sizes: Sequence[int]
    quick: Sequence[int]


CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
SWEEPS = (
    Sweep("clients", "fedavg", with_clients("fedavg"), CLIENTS, (100, 300)),
    Sweep("clients", "scaffold", with_clients("scaffold"), CLIENTS, ()),
    Sweep("parameters", "fedavg", with_parameters, [10**n for n in range(4, 9)], (2_000, 4_000)),
    Sweep("classes", "fedavg", with_classes, (10, 32, 100, 316, 1_000), (10, 20)),
    Sweep("runs in one stack", "fedavg", with_runs, (1, 2, 4, 8, 16, 32, 64), (1, 2)),
)


@dataclass(frozen=True)
class Point:
    """What was measured at one size; `problem` says why nothing was."""

    of: str
    line: str
    size: int
    seconds: float = math.nan  # a round
    cpu: float = math.nan  # CPU seconds a round: other work on the machine does not count
    peak: float = math.nan  # MB
    start: float = math.nan  # seconds until the first round has ended
    problem: str = ""


class RoundTimes(NullProgress):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends = [(time.perf_counter(), time.process_time())]

    def round(self, line: dict[str, Any]) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def measure(settings: dict[str, Any], runs: int) -> dict[str, float]:
    """Run an experiment, or several seeds of it in one stack."""
    progress = RoundTimes()
    with tempfile.TemporaryDirectory() as folder:
        if runs == 1:
            start_run(parse_experiment({}, settings), Path(folder) / "run", progress=progress)
        else:
            start_comparison(
                plan_grid({}, settings, ["fedavg"], range(runs), {}),
                Path(folder) / "comparison",
                progress=progress,
                time_limit=TimeLimit(None),
                batch_runs=runs,
            )
    seconds, cpu = np.diff(progress.ends, axis=0).T.tolist()
    return {
        "seconds": statistics.median(seconds[1:]),
        "cpu": statistics.median(cpu[1:]),
        "peak": peak_of_process() / 2**20,
        "start": seconds[0],
    }


def measure_apart(sweep: Sweep, size: int, rounds: int, limit: float) -> Point:
    """Measure one point in a process of its own."""
    job = {"settings": PLAIN | {"rounds": rounds} | sweep.settings(size), "runs": 1}
    if sweep.settings is with_runs:
        job["runs"] = size
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--point", json.dumps(job)],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Point(sweep.of, sweep.line, size, problem=f"more than {limit:.0f} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Point(sweep.of, sweep.line, size, problem=last)
    return Point(sweep.of, sweep.line, size, **json.loads(done.stdout.splitlines()[-1]))


def exponent(points: Sequence[Point], of: str) -> float:
    """The slope of the upper half of the sizes on logarithmic axes; NaN with fewer than two."""
    upper = [point for point in points[(len(points) - 1) // 2 :] if not point.problem]
    if len(upper) < 2:
        return math.nan
    size, value = np.log([[point.size, getattr(point, of)] for point in upper]).T
    return float(np.polyfit(size, value, 1)[0])


def lines_of(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points of each sweep, in the order of their sizes."""
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        lines.setdefault((point.of, point.line), []).append(point)
    return lines


def describe(points: Sequence[Point]) -> str:
    """The table: a row a point, and the exponents below each sweep."""
    rows = [
        "| | size | seconds a round | CPU seconds | peak, MB | until round 1 ended, s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (of, line), own in lines_of(points).items():
        for point in own:
            times = f"{point.seconds:.3f} | {point.cpu:.3f}"
            cells = f"{times} | {point.peak:,.0f} | {point.start:.1f}"
            rows.append(f"| {of}, {line} | {point.size:,} | {point.problem or cells} |")
        slopes = (f"{exponent(own, name):.2f}" for name in ("seconds", "cpu", "peak", "start"))
        rows.append(f"| {of}, {line}: exponent | | {' | '.join(slopes)} |")
    return "\n".join(rows)


def draw(points: Sequence[Point], file: Path) -> None:
    """Seconds a round above, peak memory below; a column for each quantity that grows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from remanence.reports.to_matplotlib import PAGE, STYLE, choose_fonts

    titles = list(dict.fromkeys(point.of for point in points))
    style: Any = STYLE | {"font.family": choose_fonts(), "text.parse_math": True}
    with rc_context(style):
        figure = Figure(figsize=(1.5 * PAGE, 4.6), layout="constrained")
        panels = figure.subplots(2, len(titles), squeeze=False)
        for row, (name, label) in enumerate((("seconds", "seconds a round"), ("peak", "peak, MB"))):
            for column, title in enumerate(titles):
                panel = panels[row, column]
                own = [own for (of, _), own in lines_of(points).items() if of == title]
                for number, line in enumerate(own):
                    panel.loglog(
                        [point.size for point in line],
                        [getattr(point, name) for point in line],
                        marker="o",
                        markersize=3,
                        linewidth=1.2,
                        color=line_style(number)["color"],
                        label=f"{line[0].line}: {exponent(line, name):.2f}",
                    )
                panel.grid(True, which="major")
                panel.legend(title="exponent", frameon=False)
                panel.minorticks_off()
                low, high = np.log10(panel.get_ylim())
                panel.set_ylim(10.0 ** math.floor(low), 10.0 ** math.ceil(high))  # whole decades
                panel.spines[["top", "right"]].set_visible(False)
                panel.set(xlabel=title if row else "", ylabel="" if column else label)
        figure.savefig(file, dpi=200, metadata={"Title": "How a run grows"})


def write_csv(points: Sequence[Point], file: Path) -> None:
    rows = [asdict(point) for point in points]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="folder of growth.csv and growth.png")
    parser.add_argument("--quick", action="store_true", help="small sizes and three rounds")
    parser.add_argument("--only", nargs="+", default=[], help="what grows, such as clients")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=300, help="seconds of a point")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(**json.loads(options.point))))
        return
    chosen = [sweep for sweep in SWEEPS if not options.only or sweep.of in options.only]
    if options.out is None or not chosen:
        names = ", ".join(dict.fromkeys(sweep.of for sweep in SWEEPS))
        parser.error(f"name a folder, and for --only some of: {names}")
    options.out.mkdir(parents=True, exist_ok=True)
    points = []
    for sweep in chosen:
        for size in sweep.quick if options.quick else sweep.sizes:
            rounds = 3 if options.quick else options.rounds
            points.append(measure_apart(sweep, size, rounds, options.limit))
            print(points[-1], file=sys.stderr, flush=True)
    write_csv(points, options.out / "growth.csv")
    draw(points, options.out / "growth.png")
    print(describe(points))


if __name__ == "__main__":
    main()
