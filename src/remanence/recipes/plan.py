"""The plan of a recipe at a scale: its runs, and which cell reads which runs.

Cells that need the same experiment share one run. Planning reads no data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remanence.config import Experiment, all_keys, parse_experiment
from remanence.core import expressions
from remanence.core.errors import InputError, nearest
from remanence.recipes.recipe import Recipe, RunScale, TableLine


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan."""

    name: str  # of its folder
    row: str  # of the first cell that needs it
    column: str
    setting: str  # the values of the recipe's grid, in words
    seed: int
    experiment: Experiment
    substitute: str = ""  # the missing dataset that it replaces


@dataclass(frozen=True)
class CellRuns:
    """The runs from which one cell of the table is computed."""

    # for every setting of the grid, the names of its runs, one for each seed
    runs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    substitute: str = ""
    missing_data: str = ""  # the dataset that is missing, so that nothing runs
    other: str = ""  # the dataset that the scale uses instead of the paper's


@dataclass(frozen=True)
class ResultPlan:
    """A recipe at a scale."""

    recipe: Recipe
    scale: str
    seeds: tuple[int, ...]
    rows: tuple[TableLine, ...]
    columns: tuple[TableLine, ...]
    runs: tuple[PlannedRun, ...]
    cells: Mapping[tuple[str, str], CellRuns]

    @property
    def scale_settings(self) -> RunScale:
        return self.recipe.scales[self.scale]

    def rounds_of(self, row: TableLine, column: TableLine) -> int:
        """The round of its runs that a cell shows: the last one, or that of its measure's `at`."""
        if row.sources:
            lines = [line for line in self.recipe.rows if line.label in row.sources]
            return min(self.rounds_of(line, column) for line in lines)
        names = {name for _, seeds in self.cells[row.label, column.label].runs for name in seeds}
        total = min(run.experiment.total_rounds for run in self.runs if run.name in names)
        at = self.measure_of(row, column).arguments.get("at")
        return total if at is None else max(1, round(at * total))

    def measure_of(self, row: TableLine, column: TableLine) -> expressions.Call:
        """The measure of a cell.

        Options are joined where a row and a column name the same measure: forgettable(at=0.1) and
        forgettable(client=2). A scale changes options of its own measure, and no other measure.
        """
        texts = [text for text in (column.measure, row.measure) if text] or [self.recipe.measure]
        chosen, *others = [expressions.parse_call(text) for text in texts]
        for call in others:
            chosen = _join(chosen, call) if call.name == chosen.name else call
        if not self.scale_settings.measure:
            return chosen
        smaller = expressions.parse_call(self.scale_settings.measure)
        return _join(chosen, smaller) if smaller.name == chosen.name else chosen


def _join(one: expressions.Call, other: expressions.Call) -> expressions.Call:
    return expressions.Call(one.name, {**one.arguments, **other.arguments})


@dataclass(frozen=True)
class PlanOptions:
    """What a user changes in a recipe, and what data are missing."""

    changes: Mapping[str, Any]
    absent: Collection[str]
    substitute_data: bool


def make_plan(
    recipe: Recipe,
    scale: str,
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    absent: Collection[str] = (),
    substitute_data: bool = False,
) -> ResultPlan:
    """Plan every run of a recipe, with checked experiments.

    Args:
        recipe: The recipe.
        scale: One of `SCALES`.
        seeds: Number of seeds. Default: that of the scale.
        only: Labels of rows or columns. Default: those of the scale.
        changes: Settings of the experiment to change, by dotted key.
        absent: Datasets that are missing. Cells that need them are left out.
        substitute_data: Use the recipe's substitutes for missing datasets instead.
    """
    settings = recipe.scales[scale]
    rows, columns = _select_lines(recipe, settings, only)
    seed_list = tuple(range(settings.seeds if seeds is None else seeds))
    if not seed_list:
        raise InputError("a result needs at least one seed: --seeds 3 uses 0, 1 and 2")
    options = PlanOptions(changes or {}, absent, substitute_data)
    runs: dict[str, PlannedRun] = {}  # by experiment, as JSON
    cells = {
        (row.label, column.label): CellRuns()
        if row.sources
        else _plan_cell(recipe, settings, row, column, seed_list, options, runs)
        for row, column in itertools.product(rows, columns)
    }
    return ResultPlan(recipe, scale, seed_list, rows, columns, tuple(runs.values()), cells)


def _plan_cell(
    recipe: Recipe,
    settings: RunScale,
    row: TableLine,
    column: TableLine,
    seeds: Sequence[int],
    options: PlanOptions,
    runs: dict[str, PlannedRun],
) -> CellRuns:
    """Plan a run for each setting of the grid and each seed; new runs are added to `runs`."""
    grid = recipe.grid if settings.grid is None else settings.grid
    found: list[tuple[str, tuple[str, ...]]] = []
    cell = CellRuns()
    for combination in itertools.product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        experiment, cell = _make_experiment(recipe, settings, row, column, values, options)
        setting = ", ".join(f"{key.split('.')[-1]}={value}" for key, value in values.items())
        names = []
        for seed in seeds if not cell.missing_data else ():
            seeded = experiment.model_copy(update={"seed": seed})
            key = seeded.model_dump_json()
            if key not in runs:
                name = _folder_name(row, column, setting, seed, runs)
                runs[key] = PlannedRun(
                    name, row.label, column.label, setting, seed, seeded, cell.substitute
                )
            names.append(runs[key].name)
        found.append((setting, tuple(names)))
    return cell if cell.missing_data else replace(cell, runs=tuple(found))


def _select_lines(
    recipe: Recipe, settings: RunScale, only: Sequence[str]
) -> tuple[tuple[TableLine, ...], tuple[TableLine, ...]]:
    """The rows and columns of a scale, or those named in `only` with the rows they are computed
    from. A row of the scale that is computed from others is kept if all of these are.
    """
    lines = {line.label.lower(): line for line in (*recipe.rows, *recipe.columns)}
    for label in only:
        if label.lower() not in lines:
            raise InputError(
                f"{recipe.name} has no row {label!r}:"
                f" {nearest(label.lower(), [line.label for line in lines.values()])}"
            )
    selected = [lines[label.lower()] for label in only]
    selected += [lines[label.lower()] for line in selected for label in line.sources]

    def select(axis: Sequence[TableLine], of_scale: Collection[str]) -> tuple[TableLine, ...]:
        named = tuple(line for line in axis if line in selected)
        return named or tuple(line for line in axis if not of_scale or line.label in of_scale)

    rows = select(recipe.rows, settings.rows)
    labels = {row.label for row in rows}
    return (
        tuple(row for row in rows if set(row.sources) <= labels),
        select(recipe.columns, settings.columns),
    )


def _make_experiment(
    recipe: Recipe,
    settings: RunScale,
    row: TableLine,
    column: TableLine,
    values: Mapping[str, Any],
    options: PlanOptions,
) -> tuple[Experiment, CellRuns]:
    """The experiment of a cell, and the state of its data as a `CellRuns` without runs."""
    cell = recipe.cells.get((row.label, column.label), {})
    published = {**row.set, **column.set, **cell, **values}
    by_line = {
        **settings.by_column.get(column.label, {}),
        **settings.by_row.get(row.label, {}),
    }
    paper = _change(parse_experiment(recipe.experiment), published)
    experiment = change_options(_change(paper, {**settings.set, **by_line}), settings.options)
    source = source_of(experiment)
    replaced = ""
    if source in options.absent and options.substitute_data and source in recipe.substitutes:
        experiment = _change(experiment, recipe.substitutes[source].set)
        replaced = source
    experiment = _change(experiment, {**options.changes, "seed": 0})
    used = source_of(experiment)
    other = used if used != source_of(paper) and not replaced else ""
    return experiment, CellRuns((), replaced, used if used in options.absent else "", other)


def _change(experiment: Experiment, keys: Mapping[str, Any]) -> Experiment:
    """Change settings. Steps replace epochs, and epochs replace steps."""
    instead = {"local.steps": "local.epochs", "local.epochs": "local.steps"}
    freed = {instead[key]: 0 for key in instead if keys.get(key) and instead[key] not in keys}
    return parse_experiment(experiment.model_dump(exclude_none=True), {**keys, **freed})


def source_of(experiment: Experiment) -> str:
    """The name of the dataset without its options.

    >>> source_of(parse_experiment(changes={"data.name": "synthetic(samples=300)"}))
    'synthetic'
    """
    name = experiment.data.name
    return "npz" if name.endswith(".npz") and "(" not in name else name.partition("(")[0].strip()


def change_options(experiment: Experiment, options: Mapping[str, Any]) -> Experiment:
    """Change options inside expressions: "model:resnet18.width" = 16 turns resnet18(norm="group")
    into resnet18(norm="group", width=16), and changes no other model.
    """
    keys: dict[str, str] = {}
    for target, value in options.items():
        match = re.fullmatch(r"([\w.]+):(\w+)\.(\w+)", target)
        if not match or match[1] not in all_keys():
            raise InputError(
                f"option {target!r} is not written as key:name.option, such as model:resnet18.width"
            )
        key, name, option = match.groups()
        text = keys.get(key) or _value_at(experiment, key)
        if text:
            calls = [
                _join(call, expressions.Call(name, {option: value})) if call.name == name else call
                for call in expressions.parse_parts(text)
            ]
            keys[key] = "+".join(str(call) for call in calls)
    return _change(experiment, keys)


def _value_at(experiment: Experiment, key: str) -> str:
    value: Any = experiment
    for part in key.split("."):
        value = getattr(value, part)
    return str(value)


def _folder_name(
    row: TableLine, column: TableLine, setting: str, seed: int, taken: Mapping[str, PlannedRun]
) -> str:
    """A unique folder name that describes the cell and has no characters of paths."""
    text = f"{row.label} {column.label} {setting} seed{seed}"
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-.").lower()[:100]
    names = {run.name for run in taken.values()}
    number = 1
    while (f"{name}-{number}" if number > 1 else name) in names:
        number += 1
    return f"{name}-{number}" if number > 1 else name
