"""What is printed at the end of a command that trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from remanence.core.errors import NOTHING_LEARNED
from remanence.results.manifest import LoadedCheckpoint

if TYPE_CHECKING:
    from remanence.sweeps.search_result import SearchResult

Resumed = Sequence[tuple[str, LoadedCheckpoint]]  # by the name of the run's folder


def print_summary(folder: Path, quiet: bool, as_json: bool, resumed: Resumed = ()) -> None:
    """Write the report of a run or a comparison, and print its results and the report's path.

    Args:
        folder: Of the run or comparison.
        quiet: Print nothing.
        as_json: Print an object.
        resumed: The runs that were resumed, and from which checkpoints.

    Raises:
        typer.Exit: A run learned nothing; the exit code says so.
    """
    from remanence.metrics.groups import group_runs
    from remanence.reports import write_report
    from remanence.reports.phrases import list_warnings
    from remanence.reports.tables import chosen_rows, render_text, run_row
    from remanence.results.run import Run, load

    done = load(folder)
    page = write_report(folder)
    rows = [run_row(done)] if isinstance(done, Run) else chosen_rows(done)
    warnings = list_warnings(group_runs([done]))
    if as_json:
        from dataclasses import asdict

        summary = {"warnings": warnings, "folder": str(folder), "report": str(page)}
        resumptions = [{"run": name, **asdict(checkpoint)} for name, checkpoint in resumed]
        results = {"results": [asdict(row) for row in rows]}
        more = {"resumed": resumptions} if resumptions else {}
        print(json.dumps(summary | results | more))
    elif not quiet:
        from rich.console import Console

        console = Console()
        for text in warnings:
            console.print(f"Warning: {text}", markup=False, highlight=False)
        console.print(render_text(rows))
        for name, checkpoint in resumed:
            print(f"{name}: resumed after round {checkpoint.round}")
        print(f"report: {page}")
    for name, checkpoint in resumed:
        if checkpoint.skipped:
            print(f"remanence: {name}: {checkpoint.describe()}", file=sys.stderr)
    exit_unless_learned(done.learned)


def print_search(done: SearchResult, quiet: bool, as_json: bool) -> None:
    """Write the report of a search, and print what it tried, its result and the report's path.

    Args:
        done: The search.
        quiet: Print nothing.
        as_json: Print an object.

    Raises:
        typer.Exit: No value is the best, or it learned nothing; the exit code says so.
    """
    from remanence.reports import write_report

    page = write_report(done.folder)
    if as_json:
        print(json.dumps(done.as_dict() | {"folder": str(done.folder), "report": str(page)}))
    elif not quiet:
        print(done.table(), done.describe(), f"report: {page}", sep="\n")
    exit_unless_learned(done.learned)


def exit_unless_learned(learned: bool) -> None:
    """End the command with the exit code of a run that learned nothing."""
    if not learned:
        raise typer.Exit(NOTHING_LEARNED)
