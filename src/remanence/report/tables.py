"""The numbers of a report: a row for every method and setting, for the terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from remanence.report.forgetting import forgetting_curve
from remanence.report.groups import (
    Group,
    abandoned_rounds,
    choose_settings,
    class_curve,
    curve,
    deviation_of,
    gather,
    is_number,
    last_value,
    mean_of,
    refusals,
)
from remanence.results import Comparison, Run

if TYPE_CHECKING:
    from rich.table import Table

MISSING = "–"  # where there is no number


@dataclass(frozen=True)
class MethodRow:
    """A method with a setting. Shares are between 0 and 1; everything is a mean over seeds, of the global model."""

    label: str
    method: str
    setting: str
    tried: int  # settings among which validation accuracy chose this one
    seeds: int  # with at least one recorded round
    planned: int  # seeds asked for
    accuracy: float | None  # on the test set, at the last recorded round
    deviation: float | None  # sample standard deviation over seeds; None for one seed
    best: float | None  # test accuracy at the best round of each seed
    macro_f1: float | None
    worst_class: float | None  # the lowest accuracy of any class
    forgetting: float | None  # mean round-wise forgetting
    validation: float | None  # accuracy at the last recorded round
    bytes_per_round: float | None  # up and down together
    seconds_per_round: float | None
    refused: int  # replies, over all seeds
    abandoned: int  # rounds, over all seeds
    unfinished: int  # seeds that have not reached the last round, or not begun
    last_round: int | None  # the last recorded round; the earliest where seeds differ


def method_rows(comparison: Comparison) -> list[MethodRow]:
    """A row for every method and every grid setting, in the order of the plan."""
    return [make_row(group) for group in gather([comparison])]


def chosen_rows(comparison: Comparison) -> list[MethodRow]:
    """The same, with one setting a method where the comparison selects by validation: `setting` and `tried` say which, of how many."""
    return [make_row(group) for group in choose_settings(gather([comparison]))]


def run_row(run: Run) -> MethodRow:
    """A single run as a row."""
    return make_row(gather([run])[0])


def make_row(group: Group) -> MethodRow:
    """A group's numbers."""
    runs = [run for run in group.runs if run.metrics]
    at_the_end = [last_value(run) for run in runs]
    evaluated = [curve(run) for run in runs]
    ends = [max(points) for points in evaluated if points]
    lost = [list(forgetting_curve(run).values()) for run in runs]
    return MethodRow(
        label=group.label,
        method=group.method,
        setting=group.setting,
        tried=group.tried,
        seeds=len(runs),
        planned=group.planned,
        accuracy=mean_of(at_the_end),
        deviation=deviation_of(at_the_end),
        best=mean_of(max(points.values()) if points else None for points in evaluated),
        macro_f1=mean_of(last_value(run, "macro_f1") for run in runs),
        worst_class=mean_of(_worst_class(run) for run in runs),
        forgetting=mean_of(mean_of(losses) for losses in lost),
        validation=mean_of(last_value(run, split="valid") for run in runs),
        bytes_per_round=mean_of(_per_round(run, "bytes_up", "bytes_down") for run in runs),
        seconds_per_round=mean_of(_per_round(run, "seconds") for run in runs),
        refused=sum(refusals(run).total() for run in runs),
        abandoned=sum(len(abandoned_rounds(run)) for run in runs),
        unfinished=group.planned - sum(run.finished for run in runs),
        last_round=min(ends) if ends else None,
    )


def _worst_class(run: Run) -> float | None:
    rounds, shares = class_curve(run)
    there = shares[-1][~np.isnan(shares[-1])] if len(rounds) else np.zeros(0)
    return float(there.min()) if there.size else None


def _per_round(run: Run, *values: str) -> float | None:
    """The mean over rounds of a sum of numbers; a round's lines, one a split, repeat them."""
    rounds = {
        line["round"]: sum(line[value] for value in values) for line in run.metrics if all(is_number(line.get(value)) for value in values)
    }
    return mean_of(rounds.values())


@dataclass(frozen=True)
class Column:
    """A column of numbers: how it is called, and how a row's cell reads."""

    heading: str
    short: str  # for 80 characters; empty: left out there
    explanation: str
    cell: Callable[[MethodRow], str]


COLUMNS = (
    Column(
        "Seeds",
        "seeds",
        "runs that differ in their seed alone",
        lambda row: f"{row.seeds}" if row.seeds == row.planned else f"{row.seeds} of {row.planned}",
    ),
    Column(
        "Test accuracy, %",
        "accuracy %",
        "the last recorded round: mean and sample standard deviation over seeds",
        lambda row: percent(row.accuracy) + (f" ± {percent(row.deviation)}" if row.deviation is not None else ""),
    ),
    Column("Best round, %", "best", "test accuracy at each seed's best round", lambda row: percent(row.best)),
    Column("Macro F1, %", "F1", "the mean over classes of F1", lambda row: percent(row.macro_f1)),
    Column("Worst class, %", "worst", "the lowest accuracy of any class", lambda row: percent(row.worst_class)),
    Column(
        "Forgotten a round, points",
        "forgot",
        "what classes lost from one recorded round to the next, averaged over classes and rounds; gains count as 0",
        lambda row: percent(row.forgetting, 2),
    ),
    Column("Validation, %", "valid", "accuracy on the clients' validation rows, last recorded round", lambda row: percent(row.validation)),
    Column("Sent a round", "", "bytes up and down together", lambda row: readable_bytes(row.bytes_per_round)),
    Column("Time a round", "", "wall-clock time", lambda row: readable_seconds(row.seconds_per_round)),
    Column("Refused", "", "replies that the gate refused, over all seeds", lambda row: str(row.refused)),
)


def percent(share: float | None, digits: int = 1) -> str:
    """
    >>> percent(0.8125), percent(None)
    ('81.2', '–')
    """
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def readable_bytes(count: float | None) -> str:
    """
    >>> readable_bytes(1_240_000), readable_bytes(12)
    ('1.2 MB', '12 B')
    """
    if count is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def readable_seconds(seconds: float | None) -> str:
    """
    >>> readable_seconds(0.0123), readable_seconds(4.56), readable_seconds(180.0)
    ('12 ms', '4.6 s', '3.0 min')
    """
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.5 else f"{seconds / 60:.1f} min"


def rank(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """The rows that have a test accuracy, the highest first."""
    return sorted((row for row in rows if row.accuracy is not None), key=lambda row: -(row.accuracy or 0.0))


def best_row(rows: Sequence[MethodRow]) -> MethodRow | None:
    """The highest test accuracy at the last recorded round; None where nothing is to compare, or the first are level."""
    ranked = rank(rows)
    return ranked[0] if len(ranked) > 1 and lead(ranked) > 0 else None


def lead(ranked: Sequence[MethodRow]) -> float:
    """By how much the first is above the second; 0 where only rounding tells them apart."""
    gap = (ranked[0].accuracy or 0.0) - (ranked[1].accuracy or 0.0)
    return gap if gap > 1e-9 else 0.0


def notes(rows: Sequence[MethodRow]) -> list[str]:
    """What a reader of the table must know besides its numbers."""
    found = []
    if best_row(rows):
        found.append("* highest mean test accuracy at the last recorded round")
    found += [f"{row.label}: chosen from {row.tried} settings by validation accuracy" for row in rows if row.tried > 1]
    found += [f"{row.label}: {row.unfinished} of {row.planned} runs unfinished" for row in rows if row.unfinished]
    found += [
        f"{row.label}: replies refused: {row.refused}, rounds abandoned: {row.abandoned}" for row in rows if row.refused or row.abandoned
    ]
    return found


def render_text(rows: Sequence[MethodRow], width: int = 80) -> Table:
    """The rows for a terminal of that many characters."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns, best = [column for column in COLUMNS if column.short], best_row(rows)
    cells = [[column.cell(row) + (" *" if row is best and column.short == "accuracy %" else "") for column in columns] for row in rows]
    taken = sum(max(len(text) for text in (column.short, *texts)) + 2 for column, *texts in zip(columns, *cells, strict=True))
    # Text, never str: rich would read square brackets in a name as markup.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=Text("\n".join(notes(rows))), caption_justify="left")
    table.add_column("method", overflow="fold", max_width=max(width - taken - 1, 8))
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row, texts in zip(rows, cells, strict=True):
        table.add_row(Text(row.label), *(Text(text) for text in texts), style="bold" if row is best else None)
    return table


def render_markdown(rows: Sequence[MethodRow]) -> str:
    """The rows as a Markdown table, the best accuracy in bold."""
    best = best_row(rows)
    lines = ["| Method | " + " | ".join(column.heading for column in COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for row in rows:
        cells = [f"**{text}**" if row is best and column is COLUMNS[1] else text for column in COLUMNS for text in [column.cell(row)]]
        lines.append(f"| {_escape_markdown(row.label)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}  " for note in notes(rows) if not note.startswith("*"))]).rstrip() + "\n"


def _escape_markdown(text: str) -> str:
    flat = " ".join(text.split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#$~&" else sign for sign in flat)
