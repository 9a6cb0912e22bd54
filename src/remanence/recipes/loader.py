"""A recipe: one result of one paper as data. `recipes/PAPER/NAME.toml` lies over
`recipes/PAPER/setting.toml`, which holds what the paper's results share.

title, source, kind (table or figure), measure, unit, better [experiment]           keys of an
experiment, as published rows, columns          lists of { label, measure, unit, better, and keys of
the experiment by dotted name }; a run is the experiment with both [published]            a list a
row, an entry a column: a number, [number, deviation], "-" where the text is silent or unreadable,
or words [[claims]]             what the paper says about these numbers, see claims.py reading
what we read into silences [scales.NAME]          how the experiment is made smaller: set, options,
rows, columns, by_row, by_column, seeds, measure [substitute_data.SOURCE]      the data to use with
--substitute-data where a source cannot be had: set, about
"""

from __future__ import annotations

import functools
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
    PublishedNumber,
    Recipe,
    RecipeError,
    RunScale,
    SubstituteDataset,
    TableLine,
)

PAPERS = ("wsm", "tce", "flashback", "fedwavg", "hast")
SETTING = "setting"
# of a row or column; everything else is a key of the experiment
_WORDS = ("label", "measure", "unit", "better", "ratio", "mean")


def list_recipes() -> list[str]:
    """The names of all results, paper by paper, tables first.

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
    """Tables first, and figure 4.10 after figure 4.9; appendices last."""
    kind, _, number = name.partition("/")[2].partition("-")
    return (
        kind != "table",
        [(not part.isdigit(), int(part) if part.isdigit() else part) for part in number.split(".")],
    )


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, checked."""
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
    """Tables are merged, readings are joined, everything else is replaced; a scale of the setting
    stays unless the recipe changes it.

    >>> deep_merge({"a": {"x": 1, "y": 2}, "interpretation": ["one"]}, {"a": {"x": 3}, "interpretation": ["two"]})
    {'a': {'x': 3, 'y': 2}, 'interpretation': ['one', 'two']}
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
    """A checked recipe from the merged tables."""
    tree = dict(tree)

    def take(key: str, kind: type, default: Any = None) -> Any:
        value = tree.pop(key, default)
        if not isinstance(value, kind):
            raise RecipeError(f"recipe {name}: {key} must be {kind.__name__}, not {value!r}")
        return value

    rows, columns = (
        tuple(_read_line(name, entry) for entry in take(key, list)) for key in ("rows", "columns")
    )
    raw, scales, stand_ins = (
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
        published=_read_published(name, raw, rows, columns),
        claims=tuple(take("claims", list)),
        interpretation=tuple(take("interpretation", list, [])),
        scales={scale: _read_scale(name, scale, scales.get(scale, {})) for scale in SCALES},
        substitutes={
            source: SubstituteDataset(entry["about"], entry["set"])
            for source, entry in stand_ins.items()
        },
        grid=take("grid", dict, {}),
        figure_kind=take("figure_kind", str, ""),
        heading=take("heading", str, "method"),
    )
    if tree:
        raise RecipeError(f"recipe {name}: unknown entry {next(iter(tree))!r}")
    return _cross_check(recipe, set(scales))


def _read_line(name: str, entry: Any) -> TableLine:
    if not isinstance(entry, dict) or not isinstance(entry.get("label"), str):
        raise RecipeError(f"recipe {name}: a row or column is a table with a label, not {entry!r}")
    keys = {key: value for key, value in entry.items() if key not in _WORDS}
    for key in keys:
        if key not in all_keys():
            raise RecipeError(
                f"recipe {name}, {entry['label']}: unknown key {key!r}: {nearest(key, all_keys())}"
            )
    words = {word: entry.get(word, "") for word in ("label", "measure", "unit", "better")}
    return TableLine(
        set=keys, ratio=tuple(entry.get("ratio", ())), mean=tuple(entry.get("mean", ())), **words
    )


def _read_scale(name: str, scale: str, entry: Mapping[str, Any]) -> RunScale:
    try:
        fields: dict[str, Any] = {
            key: tuple(value) if key in ("rows", "columns") else value
            for key, value in entry.items()
        }
        made = RunScale(**fields)
    except TypeError as error:
        raise RecipeError(f"recipe {name}, scale {scale}: {error}") from None
    for keys in (made.set, *made.by_row.values(), *made.by_column.values()):
        for key in keys:
            if key not in all_keys():
                raise RecipeError(
                    f"recipe {name}, scale {scale}: unknown key {key!r}: {nearest(key, all_keys())}"
                )
    return made


def _read_published(
    name: str, raw: Mapping[str, Any], rows: Sequence[TableLine], columns: Sequence[TableLine]
) -> dict[tuple[str, str], PublishedNumber]:
    """One entry a row and column; nothing published at all is nothing known."""
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


def read_number(entry: Any) -> PublishedNumber:
    """A published entry.

    >>> read_number([0.846, 0.01]), read_number("-").known, read_number("0.1, 0.03").value
    (PublishedNumber(value=0.846, deviation=0.01, text=''), False, 2.0)
    """
    value, deviation = entry if isinstance(entry, list) else (entry, None)
    if isinstance(value, str):
        if value == "-":
            return PublishedNumber(None, deviation)
        if value == NEVER:
            return PublishedNumber(math.inf, None, NEVER)
        # a number and the setting it was reached with
        named = re.fullmatch(r"([\d.]+) \(.+\)", value)
        if named:
            return PublishedNumber(float(named[1]), None, value)
        items = value.split(",")
        # a list of settings counts as how many they are
        if all(_is_number(item) for item in items):
            return PublishedNumber(float(len(items)), None, value)
        return PublishedNumber(None, None, value)
    return PublishedNumber(float(value), None if deviation is None else float(deviation))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cross_check(recipe: Recipe, scales: set[str]) -> Recipe:
    name, labels = recipe.name, [line.label for line in (*recipe.rows, *recipe.columns)]
    doubled = [label for label in labels if labels.count(label) > 1]
    if doubled or not recipe.rows or not recipe.columns:
        raise RecipeError(
            f"recipe {name}: every row and column needs a label of its own, and"
            f" {doubled or 'one of both'} has not"
        )
    if scales - set(SCALES):
        raise RecipeError(
            f"recipe {name}: there is no scale {sorted(scales - set(SCALES))[0]!r}:"
            f" {', '.join(SCALES)}"
        )
    for unit, better in [
        (recipe.unit, recipe.better),
        *((line.unit, line.better) for line in (*recipe.rows, *recipe.columns)),
    ]:
        if (unit or "share") not in UNITS or (better or "higher") not in ("higher", "lower"):
            raise RecipeError(
                f"recipe {name}: unit is one of {', '.join(UNITS)} and better is higher or"
                f" lower, not {unit!r}, {better!r}"
            )
    rows, columns = ({line.label for line in lines} for lines in (recipe.rows, recipe.columns))
    strange: list[Any] = [
        cell
        for cell in recipe.cells
        if len(cell) != 2 or cell[0] not in rows or cell[1] not in columns
    ]
    strange += [row.label for row in recipe.rows if not set(row.sources) <= rows]
    if strange:
        raise RecipeError(f"recipe {name}: {strange[0]!r} names a row or column that is not there")
    for scale, made in recipe.scales.items():
        for label in (*made.rows, *made.columns, *made.by_row, *made.by_column):
            if label not in labels:
                raise RecipeError(
                    f"recipe {name}, scale {scale}: there is no row or column {label!r}"
                )
    return recipe


@functools.cache
def load_all() -> tuple[Recipe, ...]:
    """Every recipe."""
    return tuple(load_recipe(name) for name in list_recipes())
