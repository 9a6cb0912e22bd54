"""benchmarks/growth.py: the small version, for real, and the exponents."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
from bench.scripts import BENCHMARKS, load_script

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

SCRIPT = BENCHMARKS / "growth.py"
growth = load_script("growth")


def test_the_small_version_measures_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--quick"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "growth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["of"] for row in rows} == {sweep.of for sweep in growth.SWEEPS}
    for row in rows:
        assert row["problem"] == ""
        assert all(float(row[name]) > 0 for name in ("seconds", "cpu", "peak", "start"))
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("\n| clients, fedavg |") == 2
    assert "collapsed" not in done.stderr


def test_exponents_are_slopes_of_the_upper_half() -> None:
    points = [
        growth.Point("clients", "fedavg", size, seconds=value, peak=5.0)
        for size, value in ((1, 7.0), (10, 7.0), (100, 1.0), (1_000, 100.0), (10_000, 1e4))
    ]
    assert growth.exponent(points, "seconds") == pytest.approx(2)
    assert growth.exponent(points, "peak") == pytest.approx(0)
    assert math.isnan(growth.exponent(points[:1], "seconds"))


def test_a_point_that_fails_or_takes_too_long_is_named() -> None:
    sweep = growth.Sweep("clients", "fedavg", lambda size: {"clients.count": -size}, (), ())
    failed = growth.measure_apart(sweep, 3, rounds=2, limit=100)
    assert "clients.count" in failed.problem
    assert math.isnan(failed.seconds)
    late = growth.measure_apart(growth.SWEEPS[0], 100, rounds=2, limit=0.01)
    assert late.problem == "more than 0 s"
    assert "| clients, fedavg | 100 | more than 0 s |" in growth.describe([late])
