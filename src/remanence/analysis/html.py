"""What a notebook shows of a run or a comparison: the table of results and a link to the report.

Names of methods and folders are untrusted: every text is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from remanence.metrics.groups import group_runs, select_by_validation
from remanence.metrics.summary_rows import MethodRow, best_row
from remanence.reports.phrases import list_warnings
from remanence.reports.table_columns import columns_for
from remanence.reports.tables import notes
from remanence.results.run import REPORT, Comparison, Run


def render_html(result: Run | Comparison, rows: Sequence[MethodRow]) -> str:
    """A table of the rows, warnings, notes and the report."""
    best = best_row(rows)
    columns = [column for column in columns_for(rows) if column.short]
    headings = "".join(
        f'<th title="{escape(column.explanation)}">{escape(column.heading)}</th>'
        for column in columns
    )
    bold = ' style="font-weight:bold"'
    lines = [
        f"<tr{bold if row is best else ''}>"
        f'<th style="text-align:left">{escape(row.label)}</th>'
        + "".join(f"<td>{escape(column.cell(row))}</td>" for column in columns)
        + "</tr>"
        for row in rows
    ]
    groups = select_by_validation(group_runs([result]))
    warnings = [f"Warning: {text}" for text in list_warnings(groups)]
    below = [*warnings, *notes(rows), _link(result)]
    return (
        f"<table><thead><tr><th></th>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        + "".join(f"<div>{text}</div>" for text in [*map(escape, below[:-1]), below[-1]])
    )


def _link(result: Run | Comparison) -> str:
    if not (result.files / REPORT).is_regular_file():
        return f"in {escape(str(result.folder))}; .report() writes the report"
    path = os.path.relpath(result.folder / REPORT)
    return f'<a href="{escape(quote(path))}" target="_blank">report: {escape(path)}</a>'
