"""The metrics of runs as tidy data frames."""

from __future__ import annotations

from typing import Any

from remanence.core.errors import InputError
from remanence.results.columns import NUMBERS
from remanence.results.run import Comparison, Run

FIRST = ("method", "seed", "round", "model", "split")


def run_frame(run: Run) -> Any:
    """One row for each line of the metrics, with the numbers of `NUMBERS` that the run has."""
    return _pandas().DataFrame(_rows(run), columns=[*FIRST, *_recorded([run])])


def comparison_frame(comparison: Comparison) -> Any:
    """The rows of all runs, with the grid's setting."""
    cells = {cell["name"]: cell for cell in comparison.cells}
    rows = [
        {**row, "method": cell["method"], "setting": cell.get("setting", "")}
        for run in comparison.runs
        for cell in [cells[run.folder.name]]
        for row in _rows(run)
    ]
    columns = [FIRST[0], "setting", *FIRST[1:], *_recorded(comparison.runs)]
    return _pandas().DataFrame(rows, columns=columns)


def _rows(run: Run) -> list[dict[str, Any]]:
    named = {"method": run.method, "seed": run.config.seed}
    return [named | line for line in run.metrics]


def _recorded(runs: Any) -> list[str]:
    """The numbers that at least one of the runs recorded, in the order of `NUMBERS`."""
    found = {name for run in runs for line in run.metrics for name in line}
    return [name for name in NUMBERS if name in found]


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("to_pandas needs pandas: pip install 'remanence-fl[parquet]'") from None
    return pandas
