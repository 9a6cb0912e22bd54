"""Pages, tables and figures: read from run folders alone."""

from __future__ import annotations

from pathlib import Path

from remanence.results.run import REPORT, load


def write_report(*folders: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained page about runs and comparisons; by default report.html in the
    first folder.
    """
    from remanence.report import page

    results = [load(folder) for folder in folders]
    return page.write_report(results, Path(out) if out is not None else results[0].folder / REPORT)
