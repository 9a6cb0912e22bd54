"""The table of results: one row for every method and setting, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remanence.metrics.convergence import RoundsToTarget, rounds_to_fractions
from remanence.metrics.groups import (
    Group,
    group_runs,
    mean_curve,
    metric_curve,
    select_by_validation,
)
from remanence.metrics.summary_rows import MethodRow, best_row, make_row
from remanence.reports.phrases import describe_abandoned, describe_rejected, describe_unfinished
from remanence.reports.table_columns import ACCURACY, DROP_ORDER, Column, columns_for
from remanence.results.run import Comparison, Run

if TYPE_CHECKING:
    from rich.table import Table

NARROWEST_NAME = 16  # characters of the method column in a terminal


def chosen_rows(result: Run | Comparison) -> list[MethodRow]:
    """One row for every method and setting of the grid, in the order of the plan; one setting a
    method if the comparison selects by validation: `setting` is the selected one of `variants`.
    """
    return [make_row(group) for group in select_by_validation(group_runs([result]))]


def rounds_to_target(groups: Sequence[Group]) -> RoundsToTarget | None:
    """Rounds until each method reached fractions of a common target (mean accuracy over seeds).

    None for a single method, and under drift, where accuracy falls again after every drift.
    """
    curves = {}
    for group in groups:
        rounds, means, _ = mean_curve(group, metric_curve)
        if rounds:
            curves[group.label] = (rounds, means)
    if len(curves) < 2 or any(
        run.metadata.get("clusters") for group in groups for run in group.runs
    ):
        return None
    return rounds_to_fractions(curves)


def notes(rows: Sequence[MethodRow]) -> list[str]:
    """Notes below the table: the best row, selected settings, unfinished runs, rejected replies."""
    found = []
    if best_row(rows):
        found.append(
            "* highest test accuracy at the last recorded round, clearly above all others over the"
            " seeds"
        )
    found += [
        f"{row.label}: selected from {row.variants} settings by validation accuracy"
        for row in rows
        if row.variants > 1
    ]
    for describe in (describe_unfinished, describe_rejected, describe_abandoned):
        found += [f"{row.label}: {text}" for row in rows if (text := describe(row))]
    return found


def render_text(
    rows: Sequence[MethodRow], width: int = 80, names: Sequence[str] | None = None
) -> Table:
    """The rows as a table for a terminal, with a legend of the columns.

    Args:
        rows: Of the table.
        width: Of the terminal, in characters.
        names: Headings of the columns. Default: those that fit.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    best = best_row(rows)
    columns = [column for column in columns_for(rows, names) if column.short]
    for dropped in ("", *([] if names else DROP_ORDER)):
        columns = [column for column in columns if column.short != dropped]
        cells = [
            [
                column.cell(row) + (" *" if row is best and column is ACCURACY else "")
                for column in columns
            ]
            for row in rows
        ]
        taken = sum(
            max(len(text) for text in (column.short, *texts)) + 2
            for column, *texts in zip(columns, *cells, strict=True)
        )
        if taken + NARROWEST_NAME < width:
            break
    # Text, not str: rich reads square brackets in a str as markup.
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        caption=Text("\n".join([*_legend(columns), *notes(rows)])),
        caption_justify="left",
    )
    table.add_column("method", overflow="fold", max_width=max(width - taken - 1, NARROWEST_NAME))
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        table.add_row(
            Text(row.label), *(Text(text) for text in texts), style="bold" if row is best else None
        )
    return table


def _legend(columns: Sequence[Column]) -> list[str]:
    """What the short headings mean."""
    parts = [f"{column.short}: {column.legend}" for column in columns if column.legend]
    return ["; ".join(parts)] if parts else []


def render_markdown(rows: Sequence[MethodRow], names: Sequence[str] | None = None) -> str:
    """The rows as a Markdown table; the accuracy of the best row, if there is one, in bold."""
    best, columns = best_row(rows), columns_for(rows, names)
    lines = [
        "| Method | " + " | ".join(column.heading for column in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for row in rows:
        cells = [
            f"**{text}**" if row is best and column is ACCURACY else text
            for column in columns
            for text in [column.cell(row)]
        ]
        lines.append(f"| {escape_markdown(row.label)} | " + " | ".join(cells) + " |")
    return (
        "\n".join(
            [
                *lines,
                "",
                *(f"{escape_markdown(note)}  " for note in notes(rows) if not note.startswith("*")),
            ]
        ).rstrip()
        + "\n"
    )


def escape_markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    flat = " ".join(text.split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#$~&" else sign for sign in flat)
