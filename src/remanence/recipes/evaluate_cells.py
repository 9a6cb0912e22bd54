"""The numbers of a table from the folders of its runs, in the paper's units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from remanence.core import expressions
from remanence.core.safe_path import SafePath
from remanence.data.downloads import download_hint
from remanence.recipes.cell_evidence import CellEvidence, RecipeMeasure
from remanence.recipes.claims import measured_cells, place_of
from remanence.recipes.measures import MEASURES
from remanence.recipes.outcomes import make_outcome
from remanence.recipes.plan import CellRuns, ResultPlan
from remanence.recipes.recipe import CellNumber, TableLine
from remanence.recipes.tables import ResultOutcome
from remanence.results.run import EXPERIMENT, RUNS, Run

RunsByCell = dict[tuple[str, str], tuple[Run, ...]]


def find_finished(plan: ResultPlan, folder: Path) -> dict[str, Run]:
    """The finished runs of a plan, by name."""
    runs = {run.name: Run(SafePath.of(folder) / RUNS / run.name) for run in plan.runs}
    return {
        name: run
        for name, run in runs.items()
        if (run.files / EXPERIMENT).is_regular_file() and run.reached_end
    }


def collect(plan: ResultPlan, finished: Mapping[str, Run]) -> tuple[ResultOutcome, RunsByCell]:
    """Compute the numbers of all cells from the finished runs, with notes on the unfinished ones.

    Returns:
        The result, and the runs of each cell.
    """
    variants = {label: _runs_of(cell, finished) for label, cell in plan.cells.items()}
    cells = {label: found[0][1] if found else () for label, found in variants.items()}
    ours: dict[tuple[str, str], CellNumber] = {}
    notes: dict[tuple[str, str], str] = {}
    for row in plan.rows:
        for column in plan.columns:
            label = (row.label, column.label)
            cell = plan.cells[label]
            if row.sources:
                continue
            evidence = CellEvidence(
                cells[label],
                {other.label: cells[other.label, column.label] for other in plan.rows},
                variants[label],
            )
            if any(runs for _, runs in variants[label]):
                ours[label] = in_unit(
                    measure_of(plan, row, column)(evidence), plan.recipe.unit_of(row, column)
                )
            note = _note(plan, cell, variants[label])
            if note:
                notes[label] = note
    for row in plan.rows:
        for column in plan.columns:
            if row.sources:
                ours[row.label, column.label] = combine(
                    row,
                    [ours.get((source, column.label), CellNumber()) for source in row.sources],
                )
    ours |= _measure_claims(plan, cells)
    return make_outcome(plan, ours, notes, _trained(plan, variants)), cells


def _measure_claims(plan: ResultPlan, cells: RunsByCell) -> dict[tuple[str, str], CellNumber]:
    """The numbers of the claims that have a measure of their own."""
    found = {}
    for (row, column), claim in measured_cells(plan.recipe):
        runs = cells.get((row.label, column.label), ())
        if runs:
            call = expressions.parse_call(claim["measure"])
            measure: RecipeMeasure = expressions.instantiate(call, MEASURES, "measure")
            others = {label: own for (label, where), own in cells.items() if where == column.label}
            number = measure(CellEvidence(runs, others, ()))
            found[place_of(claim, row, column)] = in_unit(number, claim.get("unit", ""))
    return found


def _trained(
    plan: ResultPlan, variants: Mapping[tuple[str, str], Sequence[tuple[str, Sequence[Run]]]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """The rounds and seeds behind every cell that has runs, and behind the claims' own numbers."""
    found = {}
    for row in plan.rows:
        for column in plan.columns:
            labels = row.sources or (row.label,)
            settings = [runs for label in labels for _, runs in variants[label, column.label]]
            if settings and all(settings):
                seeds = min(len(runs) for runs in settings)
                found[row.label, column.label] = plan.rounds_of(row, column), seeds
    for (row, column), claim in measured_cells(plan.recipe):
        if (row.label, column.label) in found:
            found[place_of(claim, row, column)] = found[row.label, column.label]
    return found


def measure_of(plan: ResultPlan, row: TableLine, column: TableLine) -> RecipeMeasure:
    """The measure of a cell as a function."""
    call = plan.measure_of(row, column)
    measure: RecipeMeasure = expressions.instantiate(call, MEASURES, "measure")
    return measure


def in_unit(number: CellNumber, unit: str) -> CellNumber:
    """Convert a share to the unit of the paper.

    >>> in_unit(CellNumber(0.5, 0.25), "percent")
    CellNumber(value=50.0, deviation=25.0, text='')
    """
    if unit != "percent" or number.value is None:
        return number
    return CellNumber(
        100 * number.value,
        None if number.deviation is None else 100 * number.deviation,
        number.text,
    )


def combine(row: TableLine, numbers: Sequence[CellNumber]) -> CellNumber:
    """The number of a row that is computed from others: their mean, or a ratio in percent."""
    values = [number.value for number in numbers if number.value is not None]
    if len(values) < len(numbers):
        return CellNumber()
    if row.ratio:
        return CellNumber(100 * values[0] / values[1]) if values[1] else CellNumber()
    return CellNumber(sum(values) / len(values))


def _runs_of(
    cell: CellRuns, finished: Mapping[str, Run]
) -> tuple[tuple[str, tuple[Run, ...]], ...]:
    return tuple(
        (setting, tuple(finished[name] for name in names if name in finished))
        for setting, names in cell.runs
    )


def _note(plan: ResultPlan, cell: CellRuns, variants: Sequence[tuple[str, Sequence[Run]]]) -> str:
    if cell.missing_data:
        hint = download_hint(cell.missing_data)
        return f"not run, {cell.missing_data} is not in the data folder: {hint}"
    parts = []
    if cell.substitute:
        description = plan.recipe.substitutes[cell.substitute].description
        parts.append(f"substitute for {cell.substitute}: {description}")
    if cell.other:
        parts.append(f"on {cell.other}, which this scale uses instead of the paper's data")
    missing = sum(len(names) for _, names in cell.runs) - sum(len(runs) for _, runs in variants)
    if missing:
        parts.append(f"{missing} of {sum(len(names) for _, names in cell.runs)} runs not finished")
    return "; ".join(parts)
