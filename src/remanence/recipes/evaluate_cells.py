"""From run folders to the numbers of a table, in the paper's units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from remanence.core import expressions
from remanence.data.downloads import download_hint
from remanence.recipes.claims import evaluate_claims
from remanence.recipes.measures import MEASURES, ClaimEvidence, RecipeMeasure
from remanence.recipes.plan import CellRuns, ResultPlan
from remanence.recipes.recipe import PublishedNumber, TableLine
from remanence.recipes.tables import ResultOutcome
from remanence.results.run import RUNS, SPEC, Run

CellNumbers = dict[tuple[str, str], tuple[Run, ...]]
IN_PERCENT = ("percent",)


def find_finished(plan: ResultPlan, folder: Path) -> dict[str, Run]:
    """Those of the plan's runs that came to their end, by name."""
    runs = {wanted.name: Run(folder / RUNS / wanted.name) for wanted in plan.runs}
    return {
        name: run for name, run in runs.items() if (run.folder / SPEC).exists() and run.reached_end
    }


def collect(plan: ResultPlan, there: Mapping[str, Run]) -> tuple[ResultOutcome, CellNumbers]:
    """Our numbers and the runs they come from; what is not finished is left out and said so."""
    tried = {label: _runs_of(place, there) for label, place in plan.places.items()}
    cells = {label: found[0][1] if found else () for label, found in tried.items()}
    ours: dict[tuple[str, str], PublishedNumber] = {}
    notes: dict[tuple[str, str], str] = {}
    for row in plan.rows:
        for column in plan.columns:
            label = (row.label, column.label)
            place = plan.places[label]
            if row.sources:
                continue
            evidence = ClaimEvidence(
                cells[label],
                {other.label: cells[other.label, column.label] for other in plan.rows},
                tried[label],
            )
            if any(runs for _, runs in tried[label]):
                ours[label] = in_unit(
                    measure_of(plan, row, column)(evidence), plan.recipe.unit_of(row, column)
                )
            note = _note(plan, place, tried[label])
            if note:
                notes[label] = note
    for row in plan.rows:
        for column in plan.columns:
            if row.sources:
                ours[row.label, column.label] = combine(
                    row,
                    [ours.get((source, column.label), PublishedNumber()) for source in row.sources],
                )
    return ResultOutcome(plan, ours, notes, tuple(evaluate_claims(plan.recipe, ours))), cells


def measure_of(plan: ResultPlan, row: TableLine, column: TableLine) -> RecipeMeasure:
    made: RecipeMeasure = expressions.instantiate(plan.measure_of(row, column), MEASURES, "measure")
    return made


def in_unit(number: PublishedNumber, unit: str) -> PublishedNumber:
    """Shares become percent where the paper prints percent.

    >>> in_unit(PublishedNumber(0.5, 0.25), "percent")
    PublishedNumber(value=50.0, deviation=25.0, text='')
    """
    if unit not in IN_PERCENT or number.value is None:
        return number
    return PublishedNumber(
        100 * number.value,
        None if number.deviation is None else 100 * number.deviation,
        number.text,
    )


def combine(row: TableLine, numbers: Sequence[PublishedNumber]) -> PublishedNumber:
    """A row that is made of others: their mean, or the first in percent of the second."""
    values = [number.value for number in numbers if number.value is not None]
    if len(values) < len(numbers):
        return PublishedNumber()
    if row.ratio:
        return PublishedNumber(100 * values[0] / values[1]) if values[1] else PublishedNumber()
    return PublishedNumber(sum(values) / len(values))


def _runs_of(place: CellRuns, there: Mapping[str, Run]) -> tuple[tuple[str, tuple[Run, ...]], ...]:
    return tuple(
        (setting, tuple(there[name] for name in names if name in there))
        for setting, names in place.runs
    )


def _note(plan: ResultPlan, place: CellRuns, tried: Sequence[tuple[str, Sequence[Run]]]) -> str:
    if place.missing_data:
        return f"not run, {place.missing_data} is not in the data folder: {download_hint(place.missing_data)}"
    words = []
    if place.substitute:
        words.append(
            f"stand-in for {place.substitute}: {plan.recipe.substitutes[place.substitute].about}"
        )
    if place.other:
        words.append(f"on {place.other}, which this scale takes in place of the paper's data")
    missing = sum(len(names) for _, names in place.runs) - sum(len(runs) for _, runs in tried)
    if missing:
        words.append(f"{missing} of {sum(len(names) for _, names in place.runs)} runs not finished")
    return "; ".join(words)
