"""What is printed at the end of a command that trains."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from remanence.core.errors import NOTHING_LEARNED


def print_summary(folder: Path, quiet: bool, as_json: bool) -> None:
    """Write the report of a run or a comparison, and print its results and the report's path.

    Raises:
        typer.Exit: A run learned nothing; the exit code says so.
    """
    from remanence.metrics.groups import group_runs
    from remanence.report import write_report
    from remanence.report.phrases import list_warnings
    from remanence.report.tables import chosen_rows, render_text, run_row
    from remanence.results.run import Run, load

    done = load(folder)
    page = write_report(folder)
    rows = [run_row(done)] if isinstance(done, Run) else chosen_rows(done)
    warnings = list_warnings(group_runs([done]))
    if as_json:
        from dataclasses import asdict

        results = [asdict(row) for row in rows]
        summary = {"warnings": warnings, "folder": str(folder), "report": str(page)}
        print(json.dumps(summary | {"results": results}))
    elif not quiet:
        from rich.console import Console

        console = Console()
        for text in warnings:
            console.print(f"Warning: {text}", markup=False, highlight=False)
        console.print(render_text(rows))
        print(f"report: {page}")
    exit_unless_learned(done.learned)


def exit_unless_learned(learned: bool) -> None:
    """End the command with the exit code of a run that learned nothing."""
    if not learned:
        raise typer.Exit(NOTHING_LEARNED)
