"""What is printed at the end of a command that trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from remanence.results.manifest import LoadedCheckpoint

Resumed = Sequence[tuple[str, LoadedCheckpoint]]  # by the name of the run's folder


def print_summary(folder: Path, quiet: bool, as_json: bool, resumed: Resumed = ()) -> None:
    """Write the report of a run or a comparison, and print its results and the report's path.

    Args:
        folder: Of the run or comparison.
        quiet: Print nothing.
        as_json: Print an object.
        resumed: The runs that were resumed, and from which checkpoints.
    """
    from remanence.report import write_report
    from remanence.report.tables import chosen_rows, render_text, run_row
    from remanence.results.run import Run, load

    done = load(folder)
    page = write_report(folder)
    rows = [run_row(done)] if isinstance(done, Run) else chosen_rows(done)
    if as_json:
        from dataclasses import asdict

        summary = {"folder": str(folder), "report": str(page), "results": list(map(asdict, rows))}
        resumptions = [{"run": name, **asdict(checkpoint)} for name, checkpoint in resumed]
        print(json.dumps(summary | ({"resumed": resumptions} if resumptions else {})))
    elif not quiet:
        from rich.console import Console

        Console().print(render_text(rows))
        for name, checkpoint in resumed:
            print(f"{name}: resumed after round {checkpoint.round}")
        print(f"report: {page}")
    for name, checkpoint in resumed:
        if checkpoint.skipped:
            print(f"remanence: {name}: {checkpoint.describe()}", file=sys.stderr)
