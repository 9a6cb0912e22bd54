"""What is printed at the end of a command that trains."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from remanence.cli.options import SILENT
from remanence.core.errors import NOTHING_LEARNED

if TYPE_CHECKING:
    from remanence.analysis.results import AnyResult
    from remanence.sweeps.search_result import SearchResult


def print_summary(done: AnyResult, quiet: int, as_json: bool) -> None:
    """Write the report of a run or a comparison, and print its results and the report's path.

    Args:
        done: The run or comparison.
        quiet: How often --quiet was given.
        as_json: Print an object.

    Raises:
        typer.Exit: A run learned nothing; the exit code says so.
    """
    page = done.report()
    resumed = done.resumptions
    if as_json:
        from dataclasses import asdict

        summary = {"warnings": done.labeled_warnings, "folder": str(done.folder)}
        results = {"report": str(page), "results": [asdict(row) for row in done.rows]}
        resumptions = [{"run": name, **asdict(checkpoint)} for name, checkpoint in resumed]
        more = {"resumed": resumptions} if resumptions else {}
        print(json.dumps(summary | results | more))
    elif quiet < SILENT:
        from rich.console import Console

        from remanence.reports.tables import render_text

        console = Console()
        for text in done.labeled_warnings:
            console.print(f"Warning: {text}", markup=False, highlight=False)
        console.print(render_text(done.rows))
        for name, checkpoint in resumed:
            print(f"{name}: resumed after round {checkpoint.round}")
        print(f"report: {page}")
    for name, checkpoint in resumed:
        if checkpoint.skipped:
            print(f"remanence: {name}: {checkpoint.describe()}", file=sys.stderr)
    exit_unless_learned(done.learned)


def print_search(done: SearchResult, quiet: int, as_json: bool) -> None:
    """Write the report of a search, and print what it tried, its result and the report's path.

    Args:
        done: The search.
        quiet: How often --quiet was given.
        as_json: Print an object.

    Raises:
        typer.Exit: No value is the best, or it learned nothing; the exit code says so.
    """
    from remanence.analysis.actions import report

    page = report(done)
    if as_json:
        print(json.dumps(done.as_dict() | {"folder": str(done.folder), "report": str(page)}))
    elif quiet < SILENT:
        print(done.table(), done.describe(), f"report: {page}", sep="\n")
    exit_unless_learned(done.learned)


def exit_unless_learned(learned: bool) -> None:
    """End the command with the exit code of a run that learned nothing."""
    if not learned:
        raise typer.Exit(NOTHING_LEARNED)
