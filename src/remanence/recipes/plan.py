"""From a recipe at a scale to the runs it takes. Cells that need the same experiment share one
run; nothing here touches data.
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
    """One run."""

    name: str  # of its folder
    row: str  # the first cell that needs it
    column: str
    setting: str  # the value tried, where a cell tries several
    seed: int
    spec: Experiment
    substitute: str = ""  # the source that it replaces


@dataclass(frozen=True)
class CellRuns:
    """What one cell of the table is read from."""

    # for every value tried, the names of its runs, one a seed
    runs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    substitute: str = ""
    missing_data: str = ""  # the source that is not there, so that nothing runs
    other: str = ""  # the source the scale takes in place of the paper's


@dataclass(frozen=True)
class ResultPlan:
    """A recipe at a scale."""

    recipe: Recipe
    scale: str
    seeds: tuple[int, ...]
    rows: tuple[TableLine, ...]
    columns: tuple[TableLine, ...]
    runs: tuple[PlannedRun, ...]
    places: Mapping[tuple[str, str], CellRuns]

    @property
    def scale_settings(self) -> RunScale:
        return self.recipe.scales[self.scale]

    def measure_of(self, row: TableLine, column: TableLine) -> expressions.Call:
        """The measure of a cell. A row and a column that name the same one share its options:
        forgettable(at=0.1) and forgettable(client=2).
        """
        named = [expressions.parse_call(text) for text in (column.measure, row.measure) if text]
        if self.scale_settings.measure:
            smaller = expressions.parse_call(self.scale_settings.measure)
            named = [
                smaller
                if not named
                else call
                if call.name != smaller.name
                else _join(call, smaller)
                for call in named or [smaller]
            ]
        chosen = named[0] if named else expressions.parse_call(self.recipe.measure)
        for call in named[1:]:
            chosen = _join(chosen, call) if call.name == chosen.name else call
        return chosen


def _join(one: expressions.Call, other: expressions.Call) -> expressions.Call:
    return expressions.Call(one.name, {**one.arguments, **other.arguments})


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
    """Every run of a recipe, checked.

    only: rows (or columns) by label. changes: keys of the experiment that the user wants otherwise.
    absent: sources that cannot be had; what needs them is left out or, with `substitute_data`, runs on the
    recipe's stand-in.
    """
    made = recipe.scales[scale]
    rows, columns = _choose(recipe, made, only)
    numbers = tuple(range(made.seeds if seeds is None else seeds))
    if not numbers:
        raise InputError("a result needs at least one seed: --seeds 3 uses 0, 1 and 2")
    over = recipe.grid if made.grid is None else made.grid
    tried = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    runs: dict[str, PlannedRun] = {}  # by experiment
    places = {}
    for row, column in itertools.product(rows, columns):
        if row.sources:
            places[row.label, column.label] = CellRuns()
            continue
        found: list[tuple[str, tuple[str, ...]]] = []
        place = CellRuns()
        for values in tried:
            spec, place = _make_spec(
                recipe, made, row, column, values, changes or {}, absent, substitute_data
            )
            setting = ", ".join(f"{key.split('.')[-1]}={value}" for key, value in values.items())
            names = []
            for seed in numbers if not place.missing_data else ():
                seeded = spec.model_copy(update={"seed": seed})
                experiment = seeded.model_dump_json()
                if experiment not in runs:
                    name = _name(row, column, setting, seed, runs)
                    runs[experiment] = PlannedRun(
                        name, row.label, column.label, setting, seed, seeded, place.substitute
                    )
                names.append(runs[experiment].name)
            found.append((setting, tuple(names)))
        places[row.label, column.label] = (
            place if place.missing_data else replace(place, runs=tuple(found))
        )
    return ResultPlan(recipe, scale, numbers, rows, columns, tuple(runs.values()), places)


def _choose(
    recipe: Recipe, made: RunScale, only: Sequence[str]
) -> tuple[tuple[TableLine, ...], tuple[TableLine, ...]]:
    """The rows and columns of a scale, or those asked for; a row made of others is kept where
    these are.
    """
    lines = {line.label.lower(): line for line in (*recipe.rows, *recipe.columns)}
    for label in only:
        if label.lower() not in lines:
            raise InputError(
                f"{recipe.name} has no row {label!r}:"
                f" {nearest(label.lower(), [line.label for line in lines.values()])}"
            )
    asked = [lines[label.lower()] for label in only]
    chosen = []
    for everything, of_scale in ((recipe.rows, made.rows), (recipe.columns, made.columns)):
        named = [line for line in everything if line in asked]
        chosen.append(
            tuple(named or [line for line in everything if not of_scale or line.label in of_scale])
        )
    rows, columns = chosen
    there = {row.label for row in rows}
    return tuple(row for row in rows if set(row.sources) <= there), columns


def _make_spec(
    recipe: Recipe,
    made: RunScale,
    row: TableLine,
    column: TableLine,
    values: Mapping[str, Any],
    changes: Mapping[str, Any],
    absent: Collection[str],
    substitute_data: bool,
) -> tuple[Experiment, CellRuns]:
    """-> the experiment of a cell, and what is to be said of its data"""
    published = {
        **row.set,
        **column.set,
        **recipe.cells.get((row.label, column.label), {}),
        **values,
    }
    smaller = {**made.set, **made.by_column.get(column.label, {}), **made.by_row.get(row.label, {})}
    paper = _change(parse_experiment(recipe.experiment), published)
    spec = change_options(_change(paper, smaller), made.options)
    source = source_of(spec)
    replaced = ""
    if source in absent and substitute_data and source in recipe.substitutes:
        # what makes the experiment smaller has the last word where both speak of the same thing,
        # except on the data
        spec = _change(spec, recipe.substitutes[source].set)
        replaced = source
    spec = _change(spec, {**changes, "seed": 0})
    used = source_of(spec)
    other = used if used != source_of(paper) and not replaced else ""
    return spec, CellRuns((), replaced, used if used in absent else "", other)


def _change(spec: Experiment, keys: Mapping[str, Any]) -> Experiment:
    """The experiment with other values. Who asks for steps means them instead of epochs, and
    the other way round.
    """
    instead = {"local.steps": "local.epochs", "local.epochs": "local.steps"}
    freed = {instead[key]: 0 for key in instead if keys.get(key) and instead[key] not in keys}
    return parse_experiment(spec.model_dump(exclude_none=True), {**keys, **freed})


def source_of(spec: Experiment) -> str:
    """The name of the data without its options.

    >>> source_of(parse_experiment(changes={"data.name": "synthetic(samples=300)"}))
    'synthetic'
    """
    name = spec.data.name
    return "npz" if name.endswith(".npz") and "(" not in name else name.partition("(")[0].strip()


def change_options(spec: Experiment, options: Mapping[str, Any]) -> Experiment:
    """Options inside expressions: "model:resnet18.width" = 16 makes resnet18(norm="group") to
    resnet18(norm="group", width=16) and leaves others alone.
    """
    keys: dict[str, str] = {}
    for target, value in options.items():
        match = re.fullmatch(r"([\w.]+):(\w+)\.(\w+)", target)
        if not match or match[1] not in all_keys():
            raise InputError(
                f"option {target!r} is not written as key:name.option, such as model:resnet18.width"
            )
        key, name, option = match.groups()
        text = keys.get(key) or _value_at(spec, key)
        if text:
            calls = [
                _join(call, expressions.Call(name, {option: value})) if call.name == name else call
                for call in expressions.parse_parts(text)
            ]
            keys[key] = "+".join(str(call) for call in calls)
    return _change(spec, keys)


def _value_at(spec: Experiment, key: str) -> str:
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part)
    return str(value)


def _name(
    row: TableLine, column: TableLine, setting: str, seed: int, taken: Mapping[str, PlannedRun]
) -> str:
    """A folder name that tells the cell, can go nowhere else, and is not taken."""
    name = (
        re.sub(r"[^A-Za-z0-9.=]+", "-", f"{row.label} {column.label} {setting} seed{seed}")
        .strip("-.")
        .lower()[:100]
    )
    names = {wanted.name for wanted in taken.values()}
    number = 1
    while (f"{name}-{number}" if number > 1 else name) in names:
        number += 1
    return f"{name}-{number}" if number > 1 else name
