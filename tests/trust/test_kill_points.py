"""A run that is killed at any line of any phase resumes to the same bits; reports and recipes are
complete or missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rounds.drift_runs import config_of
from rounds.test_decentralized import EVERYTHING, all_contents
from rounds.test_resume import seeded_net, small_config
from trust.faults import PHASES, SCALE, record_trial
from trust.killing import count_lines, draw_points, killed

from remanence.config import Experiment
from remanence.recipes.reproduce import reproduce
from remanence.reports import write_report
from remanence.results.run import EXPERIMENT, Run
from remanence.rounds.loop import resume_run, start_run

SEEDS = range(10 if SCALE.parts > 1 else 1)  # of the draws of points: a test each
EACH = max(1, -(-SCALE.kills // (len(SEEDS) * 10)))  # kills a phase, with a server and without one


def server_run(folder: Path) -> Run:
    return start_run(
        small_config(rounds=4, **{"record.examples": True}),
        folder,
        overwrite=True,
        module=seeded_net(),
    )


def peers_spec() -> Experiment:
    return config_of("hast(peers=2, depth=1)+moon", **EVERYTHING, rounds=2)


KINDS: dict[str, tuple[Callable[[Path], Run], Callable[[Path], Run]]] = {
    "with": (server_run, lambda folder: resume_run(folder, module=seeded_net())),
    "without": (lambda folder: start_run(peers_spec(), folder, overwrite=True), resume_run),
}


@functools.cache
def _straight(kind: str, home: Path) -> tuple[Any, Any]:
    """The results of an uninterrupted run, and how many lines each phase has."""
    begin, _ = KINDS[kind]
    counts = count_lines(lambda: begin(home / f"straight-{kind}"))
    return all_contents(home / f"straight-{kind}"), counts


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_anywhere_resumes_exactly(
    tmp_path: Path, home: Path, kind: str, seed: int
) -> None:
    begin, resume = KINDS[kind]
    wanted, counts = _straight(kind, home)
    for place, (phase, number) in enumerate(draw_points(counts, PHASES[:5], EACH, seed)):
        folder = tmp_path / str(place)
        assert killed(lambda folder=folder: begin(folder), phase, number), (phase, number)
        if (folder / EXPERIMENT).exists():
            resume(folder)
        else:  # killed before there was anything to go on with
            begin(folder)
        assert all_contents(folder) == wanted, f"killed at line {number} of {phase}"
        record_trial(f"killed in {phase}, {kind} a server", "the same bits")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_is_complete_or_the_old_one(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "run"
    server_run(folder)
    page = tmp_path / "report.html"
    write_report(folder, out=page)
    new, old = page.read_bytes(), b"the old page"
    counts = count_lines(lambda: write_report(folder, out=page))
    # drawing it, and putting it in place
    points = draw_points(counts, ("report", "checkpoint"), 1, seed)
    for phase, number in points:
        page.write_bytes(old)
        assert killed(lambda: write_report(folder, out=page), phase, number), (phase, number)
        assert page.read_bytes() in (old, new)
        write_report(folder, out=page)
        assert page.read_bytes() == new
    record_trial(
        "killed while a report is written",
        "the old page or the new one; written again, the same bytes",
        len(points),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_recipe_resumes_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.delenv("REMANENCE_DATA", raising=False)

    def run(folder: Path) -> Any:
        return reproduce("wsm/table-3.3", folder, scale="smoke", report=False).ours

    counts = count_lines(lambda: run(tmp_path / "straight"))
    wanted = run(tmp_path / "straight")
    points = draw_points(
        counts, ("training", "record", "checkpoint", "gate and server", "evaluation"), 1, seed
    )
    for place, (phase, number) in enumerate(points):
        folder = tmp_path / str(place)
        assert killed(lambda folder=folder: run(folder), phase, number), (phase, number)
        assert run(folder) == wanted, f"killed at line {number} of {phase}"
    record_trial("killed while a recipe runs", "the same numbers", len(points))
