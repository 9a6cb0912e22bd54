"""What a killed process did not finish writing is deleted by the next one that writes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from reports.conftest import write_run

import remanence as rem
from remanence.exports import export
from remanence.flower.client_app import handle
from remanence.flower.settings import read_site
from remanence.flower.wire import WireMessage
from remanence.recipes import results_pages
from remanence.reports import write_report
from remanence.reports.figure_files import write_figures

LEFT = ".remanence-0123456789abcdef.tmp"
OUTCOMES = Path(__file__).parents[2] / "docs" / "results" / "outcomes"


def leave(folder: Path) -> Path:
    """As a process that is killed while it writes a page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LEFT).write_bytes(bytes(5 << 20))
    return folder / LEFT


def figures(home: Path) -> list[Path]:
    pytest.importorskip("matplotlib", reason="the extra figures is not installed")
    left = [leave(home / "figures")]
    write_figures([write_run(home / "run", [[0.5, 0.4]])], home / "figures")
    return left


def report(home: Path) -> list[Path]:
    run = write_run(home / "run", [[0.5, 0.4]])
    left = [leave(run.folder)]
    write_report(run.folder)
    return left


def report_elsewhere(home: Path) -> list[Path]:
    run = write_run(home / "run", [[0.5, 0.4]])
    left = [leave(home / "pages")]
    write_report(run.folder, out=home / "pages" / "page.html")
    return left


def model(home: Path) -> list[Path]:
    data = "synthetic(samples=40, classes=2, features=3)"
    settings = {"clients": 2, "rounds": 1, "engine": "sequential", "quiet": True}
    run = rem.run(data=data, model="mlp(hidden=2)", out=home / "run", **settings)
    left = [leave(run.folder / "export")]
    export(run)
    return left


def pages(home: Path) -> list[Path]:
    outcome = next(path for path in sorted(OUTCOMES.iterdir()) if "table" in path.name)
    left = [leave(home / "pages" / "outcomes" / outcome.name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_pages, "PAPERS", ())  # the pages themselves take long
        results_pages.write_results([outcome], home / "pages")
    return left


def site(home: Path) -> list[Path]:
    """A message that the site declines, after it has locked its folder."""
    (home / "site.toml").write_text('name = "a"\n[data]\n0 = "share"\n[compute]\ndaemon = false\n')
    file = read_site(home / "site.toml")
    left = [leave(file.state), leave(file.state / "0123abcd-run" / "client-0000000")]
    handle(file, WireMessage({"kind": "unknown"}, {}))
    return left


@pytest.mark.parametrize("work", [report, report_elsewhere, figures, model, pages, site])
def test_the_next_writer_deletes_what_a_killed_one_left(
    tmp_path: Path, work: Callable[[Path], list[Path]]
) -> None:
    left = work(tmp_path)
    assert left
    assert not any(path.exists() for path in left)
