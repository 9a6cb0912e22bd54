"""Recipes from TOML files. `recipes/PAPER/NAME.toml` is merged over `recipes/PAPER/setting.toml`,
which has what the results of a paper share. The entries of a file:

- `title`, `source`, `kind` (table, figure or calibration), `measure`, `unit`, `better`,
  `figure_kind`, `heading`
- `[experiment]`: the settings as published
- `rows`, `columns`: lists of `{ label, measure, unit, better }` and settings by dotted key; the run
  of a cell has the settings of the experiment, its row and its column
- `[cells]`: settings of single cells, by "ROW | COLUMN"
- `[published]`: a list for each row with an entry for each column: a number, [number, deviation],
  "-" where the paper has no readable number, or a text
- `[[claims]]`: what the paper claims about these numbers, see `claims`
- `interpretation`: how we interpret what the paper leaves open
- `[scales.NAME]`: a smaller version: description, set, options, rows, columns, by_row, by_column,
  grid, seeds, measure
- `[substitute_data.SOURCE]`: the data for --substitute-data if SOURCE is missing: description, set
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from remanence.config import all_keys
from remanence.core.errors import nearest, unknown
from remanence.recipes.recipe import (
    KINDS,
    NEVER,
    SCALES,
    UNITS,
    CellNumber,
    Recipe,
    RecipeError,
    RunScale,
    SubstituteDataset,
    TableLine,
)

PAPERS = ("wsm", "tce", "flashback", "fedwavg", "hast")
SETTING = "setting"
# entries of a row or column that are not settings of the experiment
_LINE_ENTRIES = ("label", "measure", "unit", "better", "ratio", "mean")


def list_recipes() -> list[str]:
    """Return the names of all recipes, paper by paper, tables first.

    >>> list_recipes()[:3]
    ['wsm/table-3.1', 'wsm/table-3.2', 'wsm/table-3.3']
    """
    found = []
    for paper in PAPERS:
        names = [
            file.name.removesuffix(".toml")
            for file in resources.files(__package__).joinpath(paper).iterdir()
        ]
        found += sorted((f"{paper}/{name}" for name in names if name.startswith(KINDS)), key=_order)
    return found


def _order(name: str) -> tuple[Any, ...]:
    """Sort key: tables first, figure 4.10 after figure 4.9, appendices last."""
    kind, _, number = name.partition("/")[2].partition("-")
    return (
        kind != "table",
        [(not part.isdigit(), int(part) if part.isdigit() else part) for part in number.split(".")],
    )


def load_recipe(name: str) -> Recipe:
    """Read and check the recipe with this name, such as `wsm/table-3.2`."""
    known = list_recipes()
    if name not in known:
        raise unknown("result", name, known)
    paper, _, rest = name.partition("/")
    folder = resources.files(__package__).joinpath(paper)
    setting, own = (
        tomllib.loads(folder.joinpath(f"{file}.toml").read_text(encoding="utf-8"))
        for file in (SETTING, rest)
    )
    return read_recipe(name, deep_merge(setting, own))


def deep_merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees: tables are merged, interpretations are joined, other values are replaced.

    >>> deep_merge({"a": {"x": 1, "y": 2}}, {"a": {"x": 3}})
    {'a': {'x': 3, 'y': 2}}
    >>> deep_merge({"interpretation": ["one"]}, {"interpretation": ["two"]})
    {'interpretation': ['one', 'two']}
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = deep_merge(old, value)
        elif key == "interpretation" and isinstance(old, list):
            merged[key] = [*old, *value]
        else:
            merged[key] = value
    return merged


def read_recipe(name: str, tree: Mapping[str, Any]) -> Recipe:
    """Check the merged tables of a recipe."""
    tree = dict(tree)

    def take(key: str, kind: type, default: Any = None) -> Any:
        value = tree.pop(key, default)
        if not isinstance(value, kind):
            raise RecipeError(f"recipe {name}: {key} must be {kind.__name__}, not {value!r}")
        return value

    rows, columns = (
        tuple(_read_line(name, entry) for entry in take(key, list)) for key in ("rows", "columns")
    )
    published, scales, substitutes = (
        take("published", dict, {}),
        take("scales", dict),
        take("substitute_data", dict, {}),
    )
    recipe = Recipe(
        name=name,
        title=take("title", str),
        paper=take("paper", str),
        source=take("source", str),
        kind=take("kind", str, name.partition("/")[2].partition("-")[0]),
        measure=take("measure", str),
        unit=take("unit", str, "share"),
        better=take("better", str, "higher"),
        experiment=take("experiment", dict),
        rows=rows,
        columns=columns,
        cells={tuple(key.split(" | ")): keys for key, keys in take("cells", dict, {}).items()},
        published=_read_published(name, published, rows, columns),
        claims=tuple(take("claims", list)),
        interpretation=tuple(take("interpretation", list, [])),
        scales={scale: _read_scale(name, scale, scales.get(scale, {})) for scale in SCALES},
        substitutes={
            source: SubstituteDataset(entry["description"], entry["set"])
            for source, entry in substitutes.items()
        },
        grid=take("grid", dict, {}),
        figure_kind=take("figure_kind", str, ""),
        heading=take("heading", str, "method"),
    )
    if tree:
        raise RecipeError(f"recipe {name}: unknown entry {next(iter(tree))!r}")
    _check_units(recipe)
    _check_labels(recipe, set(scales))
    return recipe


def _read_line(name: str, entry: Any) -> TableLine:
    if not isinstance(entry, dict) or not isinstance(entry.get("label"), str):
        raise RecipeError(f"recipe {name}: a row or column is a table with a label, not {entry!r}")
    keys = {key: value for key, value in entry.items() if key not in _LINE_ENTRIES}
    for key in keys:
        if key not in all_keys():
            raise RecipeError(
                f"recipe {name}, {entry['label']}: unknown key {key!r}: {nearest(key, all_keys())}"
            )
    texts = {name: entry.get(name, "") for name in ("label", "measure", "unit", "better")}
    return TableLine(
        set=keys, ratio=tuple(entry.get("ratio", ())), mean=tuple(entry.get("mean", ())), **texts
    )


def _read_scale(name: str, scale: str, entry: Mapping[str, Any]) -> RunScale:
    try:
        fields: dict[str, Any] = {
            key: tuple(value) if key in ("rows", "columns") else value
            for key, value in entry.items()
        }
        settings = RunScale(**fields)
    except TypeError as error:
        raise RecipeError(f"recipe {name}, scale {scale}: {error}") from None
    for keys in (settings.set, *settings.by_row.values(), *settings.by_column.values()):
        for key in keys:
            if key not in all_keys():
                raise RecipeError(
                    f"recipe {name}, scale {scale}: unknown key {key!r}: {nearest(key, all_keys())}"
                )
    return settings


def _read_published(
    name: str, raw: Mapping[str, Any], rows: Sequence[TableLine], columns: Sequence[TableLine]
) -> dict[tuple[str, str], CellNumber]:
    """One entry for each row and column; without `published`, no number is known."""
    labels = [row.label for row in rows]
    if raw and set(raw) != set(labels):
        wrong = sorted(set(raw) ^ set(labels))[0]
        raise RecipeError(f"recipe {name}: published numbers and rows differ at {wrong!r}")
    found = {}
    for label in labels:
        entries = raw.get(label, ["-"] * len(columns))
        if not isinstance(entries, list) or len(entries) != len(columns):
            raise RecipeError(
                f"recipe {name}: row {label!r} publishes {entries!r}, which is not one"
                f" entry for each of {len(columns)} columns"
            )
        for column, entry in zip(columns, entries, strict=True):
            found[label, column.label] = read_number(entry)
    return found


def read_number(entry: Any) -> CellNumber:
    """Read a published entry.

    >>> read_number([0.846, 0.01]), read_number("-").known, read_number("0.1, 0.03").value
    (CellNumber(value=0.846, deviation=0.01, text=''), False, 2.0)
    >>> read_number(["64.08 (derived)", 2.86])
    CellNumber(value=64.08, deviation=2.86, text='64.08 (derived)')
    """
    value, deviation = entry if isinstance(entry, list) else (entry, None)
    if isinstance(value, str):
        if value == "-":
            return CellNumber(None, deviation)
        if value == NEVER:
            return CellNumber(math.inf, None, NEVER)
        # a number with the setting that reached it, or with where it is from
        named = re.fullmatch(r"([\d.]+) \(.+\)", value)
        if named:
            return CellNumber(float(named[1]), deviation, value)
        items = value.split(",")
        # a list of settings counts as their number
        if all(_is_number(item) for item in items):
            return CellNumber(float(len(items)), None, value)
        return CellNumber(None, None, value)
    return CellNumber(float(value), None if deviation is None else float(deviation))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_units(recipe: Recipe) -> None:
    for unit, better in [
        (recipe.unit, recipe.better),
        *((line.unit, line.better) for line in (*recipe.rows, *recipe.columns)),
    ]:
        if (unit or "share") not in UNITS or (better or "higher") not in ("higher", "lower"):
            raise RecipeError(
                f"recipe {recipe.name}: unit is one of {', '.join(UNITS)} and better is higher or"
                f" lower, not {unit!r}, {better!r}"
            )


def _check_labels(recipe: Recipe, scales: set[str]) -> None:
    """Labels are unique, and every label and scale that the recipe names exists."""
    name, labels = recipe.name, [line.label for line in (*recipe.rows, *recipe.columns)]
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated or not recipe.rows or not recipe.columns:
        raise RecipeError(
            f"recipe {name}: every row and column needs a label of its own, and"
            f" {repeated or 'one of both'} has not"
        )
    if scales - set(SCALES):
        raise RecipeError(
            f"recipe {name}: there is no scale {sorted(scales - set(SCALES))[0]!r}:"
            f" {', '.join(SCALES)}"
        )
    rows, columns = ({line.label for line in lines} for lines in (recipe.rows, recipe.columns))
    unknown_lines: list[Any] = [
        cell
        for cell in recipe.cells
        if len(cell) != 2 or cell[0] not in rows or cell[1] not in columns
    ]
    unknown_lines += [row.label for row in recipe.rows if not set(row.sources) <= rows]
    if unknown_lines:
        raise RecipeError(
            f"recipe {name}: {unknown_lines[0]!r} names a row or column that is not there"
        )
    for scale, settings in recipe.scales.items():
        for label in (*settings.rows, *settings.columns, *settings.by_row, *settings.by_column):
            if label not in labels:
                raise RecipeError(
                    f"recipe {name}, scale {scale}: there is no row or column {label!r}"
                )
