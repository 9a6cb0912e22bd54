"""The table of a paper with three numbers in each cell (published, ours, difference), as Markdown,
as CSV and for the terminal.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remanence.recipes.plan import ResultPlan
from remanence.recipes.recipe import CellNumber, TableLine
from remanence.recipes.verdicts import SOME, TOO_EARLY, UNTESTED, Basis, ClaimVerdict, write_range
from remanence.report.tables import escape_markdown as escape

if TYPE_CHECKING:
    from rich.table import Table

DASH = "-"
# with more columns in the paper's table, the three numbers share a cell
MAX_SPLIT_COLUMNS = 4
FIELDS = (
    "result",
    "scale",
    "row",
    "column",
    "unit",
    "published",
    "published_deviation",
    "ours",
    "deviation",
    "seeds",
    "difference",
    "note",
)


@dataclass(frozen=True)
class ResultOutcome:
    """The result of a recipe: our numbers in the paper's units, and notes on single cells."""

    plan: ResultPlan
    ours: Mapping[tuple[str, str], CellNumber]
    notes: Mapping[tuple[str, str], str]  # why a cell is empty, or which data it uses
    bases: Mapping[tuple[str, str], Basis]  # what our numbers rest on
    verdicts: tuple[ClaimVerdict, ...]


def write_number(number: CellNumber, unit: str) -> str:
    """Format a number as the papers do.

    >>> write_number(CellNumber(0.8461, 0.0102), "share")
    '0.846 ± 0.010'
    >>> write_number(CellNumber(5.25), "percent")
    '5.25'
    """
    if number.text:
        return number.text
    if number.value is None:
        return DASH
    digits = {"share": 3, "percent": 2}.get(unit, 0 if number.value == round(number.value) else 2)
    deviation = (
        ""
        if number.deviation is None
        else f" ± {number.deviation:.{max(digits, 2 if unit != 'share' else 3)}f}"
    )
    return f"{number.value:.{digits}f}{deviation}"


def write_difference(published: CellNumber, ours: CellNumber, unit: str) -> str:
    """Format ours minus published with its sign; a dash if one of them is missing or infinite."""
    if (
        published.value is None
        or ours.value is None
        or math.isinf(published.value)
        or math.isinf(ours.value)
    ):
        return DASH
    digits = {"share": 3, "percent": 2}.get(
        unit, 0 if (ours.value - published.value).is_integer() else 2
    )
    return f"{ours.value - published.value:+.{digits}f}"


def cell_texts(outcome: ResultOutcome, row: TableLine, column: TableLine) -> tuple[str, str, str]:
    """The published number, ours and the difference of a cell, as texts."""
    recipe, place = outcome.plan.recipe, (row.label, column.label)
    unit = recipe.unit_of(row, column)
    published, ours = recipe.published[place], outcome.ours.get(place, CellNumber())
    substituted = outcome.plan.cells[place].substitute and ours.known
    return (
        write_number(published, unit),
        write_number(ours, unit) + (" (substitute)" if substituted else ""),
        write_difference(published, ours, unit),
    )


def headings(outcome: ResultOutcome) -> list[str]:
    """The headings of the columns."""
    plan = outcome.plan
    if len(plan.columns) > MAX_SPLIT_COLUMNS:
        return [plan.recipe.heading, *(column.label for column in plan.columns)]
    kinds = ("published", "ours", "difference")
    return [
        plan.recipe.heading,
        *(f"{column.label}: {kind}" for column in plan.columns for kind in kinds),
    ]


def body(outcome: ResultOutcome) -> list[list[str]]:
    """The rows, in the layout of `headings`."""
    lines = []
    for row in outcome.plan.rows:
        cells = [cell_texts(outcome, row, column) for column in outcome.plan.columns]
        wide = len(outcome.plan.columns) > MAX_SPLIT_COLUMNS
        lines.append(
            [row.label, *(" / ".join(texts) for texts in cells)]
            if wide
            else [row.label, *(text for texts in cells for text in texts)]
        )
    return lines


def as_markdown(outcome: ResultOutcome) -> str:
    """The table with the notes on its cells."""
    heads = headings(outcome)
    lines = [
        heads,
        ["---", *["--:"] * (len(heads) - 1)],
        *([escape(text) for text in line] for line in body(outcome)),
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    shared = (
        "A cell is published / ours / difference.\n\n"
        if len(outcome.plan.columns) > MAX_SPLIT_COLUMNS
        else ""
    )
    return (
        shared
        + table
        + "".join(f"\n{note}  " for note in describe_notes(outcome))
        + ("\n" if describe_notes(outcome) else "")
    )


def describe_notes(outcome: ResultOutcome) -> list[str]:
    """The notes on cells, each once with the columns of these cells."""
    by_note: dict[str, list[str]] = {}
    for (_, column), note in outcome.notes.items():
        columns = by_note.setdefault(note, [])
        if column not in columns:
            columns.append(column)
    everywhere = len(outcome.plan.columns)
    return [
        f"{'All columns' if len(columns) == everywhere else ', '.join(columns)}: {note}"
        for note, columns in by_note.items()
    ]


def as_csv(outcome: ResultOutcome) -> str:
    """The result as CSV, one line for each cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    plan = outcome.plan
    for row in plan.rows:
        for column in plan.columns:
            place, unit = (row.label, column.label), plan.recipe.unit_of(row, column)
            published, ours = (
                plan.recipe.published[place],
                outcome.ours.get(place, CellNumber()),
            )
            numbers = [_plain(published), published.deviation, _plain(ours), ours.deviation]
            gap = write_difference(published, ours, unit)
            writer.writerow(
                [
                    plan.recipe.name,
                    plan.scale,
                    *place,
                    unit,
                    *("" if number is None else number for number in numbers),
                    len(plan.seeds),
                    "" if gap == DASH else gap,
                    outcome.notes.get(place, ""),
                ]
            )
    return text.getvalue()


def _plain(number: CellNumber) -> str | float | None:
    return number.text or number.value


def as_table(outcome: ResultOutcome, width: int) -> Table:
    """The table for a terminal: in the paper's layout if it fits, else a line for each cell."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heads, lines = headings(outcome), body(outcome)
    if (
        sum(max(len(line[place]) for line in (heads, *lines)) + 2 for place in range(len(heads)))
        > width
    ):
        plan = outcome.plan
        heads = [plan.recipe.heading, "", "published", "ours", "difference"]
        lines = [
            [row.label, column.label, *cell_texts(outcome, row, column)]
            for row in plan.rows
            for column in plan.columns
        ]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(
            Text(head), justify="left" if place == 0 or not head else "right", overflow="fold"
        )
    for line in lines:
        table.add_row(*(Text(text) for text in line))
    return table


def describe_claims(outcome: ResultOutcome) -> list[str]:
    """Describe each claim in one line: its text, the verdict, and what this rests on."""
    return [f"{verdict.text} {_describe_verdict(outcome, verdict)}" for verdict in outcome.verdicts]


def _describe_verdict(outcome: ResultOutcome, verdict: ClaimVerdict) -> str:
    basis = verdict.basis
    if basis is None:
        smoke = "scale smoke only shows that the recipe runs"
        reason = smoke if outcome.plan.scale == "smoke" else "none of its numbers was run"
        return f"{UNTESTED.upper()}: {reason}."
    replaced = sorted({cell.substitute for cell in outcome.plan.cells.values() if cell.substitute})
    on = f", with substitutes for {' and '.join(replaced)}" if replaced else ""
    why = f" {verdict.too_early}" if verdict.word == TOO_EARLY and verdict.too_early else ""
    return (
        f"{verdict.word.upper()} at scale {outcome.plan.scale}{on}:"
        f" {describe_numbers(verdict, basis)}.{why}"
    )


def describe_counts(outcome: ResultOutcome) -> list[str]:
    """Describe the numbers of each claim that was run, without a verdict."""
    return [
        f"{verdict.text} {describe_numbers(verdict, verdict.basis)}."
        for verdict in outcome.verdicts
        if verdict.basis is not None
    ]


def describe_numbers(verdict: ClaimVerdict, basis: Basis) -> str:
    return (
        f"ours {verdict.ours}, published {verdict.published};"
        f" {describe_comparisons(verdict)} as claimed; {describe_rounds(basis)} rounds;"
        f" {describe_seeds(basis)}"
    )


def describe_comparisons(verdict: ClaimVerdict) -> str:
    """The comparisons that are as claimed, of those that were run, of all.

    >>> describe_comparisons(ClaimVerdict("", ()))
    '0 of 0 comparisons'
    """
    left = len(verdict.checks) - len(verdict.run)
    rest = f" ({left} not run)" if left else ""
    return f"{verdict.held} of {len(verdict.run)} comparisons{rest}"


def describe_rounds(basis: Basis) -> str:
    """
    >>> describe_rounds(Basis(500, 4000, 1))
    '500 of 4,000'
    """
    return f"{basis.rounds:,} of {basis.published:,}"


def describe_seeds(basis: Basis) -> str:
    return "1 seed" if basis.seeds == 1 else f"{basis.seeds} seeds"


def describe_disagreements(outcome: ResultOutcome) -> list[str]:
    """Describe every comparison that differs from its claim, with our number and the published
    one. A claim of some comparisons does not disagree with the others.
    """
    found = []
    for verdict in outcome.verdicts:
        for check in verdict.run if verdict.of != SOME else ():
            if not check.as_claimed:
                ours, published = (
                    write_range([check], [number]) for number in (check.ours, check.published)
                )
                least = f", claimed at least {write_range([check], [check.by])}" if check.by else ""
                found.append(f"{check.what}: ours {ours}, published {published}{least}")
    return found
