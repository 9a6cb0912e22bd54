"""What is printed at the end of a command that trains."""

from __future__ import annotations

import json
from pathlib import Path


def print_summary(folder: Path, quiet: bool, as_json: bool) -> None:
    """Write the report of a run or a comparison, and print its results and the report's path."""
    from remanence.report import write_report
    from remanence.report.tables import chosen_rows, render_text, run_row
    from remanence.results.run import Run, load

    done = load(folder)
    page = write_report(folder)
    rows = [run_row(done)] if isinstance(done, Run) else chosen_rows(done)
    if as_json:
        from dataclasses import asdict

        results = [asdict(row) for row in rows]
        print(json.dumps({"folder": str(folder), "report": str(page), "results": results}))
    elif not quiet:
        from rich.console import Console

        Console().print(render_text(rows))
        print(f"report: {page}")
