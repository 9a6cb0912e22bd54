"""The search for a numeric setting of a method, such as its learning rate, on validation data.

The rule is that of section 3.4.1 of the thesis on HAST: half magnitudes around a guess, then
quarter magnitudes around the best. A magnitude is a factor of ten. Readings, where the section is
silent:

- It tries quarter magnitudes "in some occasions", where the half ones do not separate the best. We
  always try them. With few seeds the half ones rarely do, and every method gets the same effort.
- It does not say what happens where the best value is the largest or the smallest one. We go on
  beyond it in half magnitudes, at most `MAX_BEYOND` times.
- The best value has the highest validation accuracy in the last recorded round, as a mean over
  seeds; of equal ones it is the one that was tried first. A value with which a seed diverged is the
  worst.
- Values are rounded to three digits. Where a setting does not take a value, it is left out.

A search is a comparison whose plan has a table `search` and grows by a stage at a time. What is
tried next follows from the results alone, so a search that was stopped goes on as it would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remanence.config import FLAGS
from remanence.core.errors import InputError
from remanence.core.files import folder_name
from remanence.core.imports import import_paths
from remanence.core.progress import Progress
from remanence.core.safe_path import SafePath
from remanence.results.readers import LARGEST_GUESS
from remanence.results.run import COMPARISON, SEARCH, Comparison
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.grid import (
    GridPoint,
    extend_comparison,
    plan_grid,
    resume_comparison,
    start_comparison,
)
from remanence.sweeps.search_result import SearchResult

# Positions are in quarters of a magnitude from the guess.
HALF, QUARTER = 2, 1
FIRST = range(-8, 9, HALF)
MAX_BEYOND = 4  # half magnitudes beyond the first range, in total
TABLE = "search.json"


@dataclass(frozen=True)
class SearchSpace:
    """What is searched: the experiment, the method and the setting.

    Args:
        base: The experiment.
        changes: Keys that differ from it in all runs.
        method: The method.
        seeds: Of each value.
        key: The setting by its dotted key, or an option of a part such as `fedprox.mu`.
        around: The guess.
    """

    base: Mapping[str, Any]
    changes: Mapping[str, Any]
    method: str
    seeds: Sequence[int]
    key: str
    around: float

    def value_at(self, position: int) -> float | None:
        """The value at a position; None where the setting does not take it."""
        exact = self.around * 10 ** (position / 4)
        candidates = [float(f"{exact:.3g}")] if position else [self.around]
        if isinstance(self.around, int) and round(exact) >= 1:
            candidates.append(round(exact))  # of a setting that takes whole numbers alone
        for value in candidates:
            try:
                self.plan([value])
            except InputError:
                continue
            return value
        return None

    def plan(self, values: Sequence[float]) -> list[GridPoint]:
        """The runs of some values."""
        cells = plan_grid(
            self.base, self.changes, [self.method], self.seeds, {self.key: list(values)}
        )
        return [
            replace(cell, name=folder_name(f"{cell.setting} seed{cell.seed}"), condition="")
            for cell in cells
        ]

    def check(self) -> None:
        """Refuse a guess that is no number above 0, and one that the setting does not take."""
        guess = self.around
        if isinstance(guess, bool) or not isinstance(guess, int | float):
            raise InputError(f"the search is around {guess!r}, which is not a number: give a guess")
        if not (1 / LARGEST_GUESS < guess < LARGEST_GUESS):
            raise InputError(
                f"the search is around {guess}: give a guess above 0 and below {LARGEST_GUESS:g}"
            )
        if self.key in self.changes:
            raise InputError(
                f"the search varies {self.key}, which is also set to {self.changes[self.key]!r}:"
                " leave out one of them"
            )
        self.plan([guess])


def search_values(
    space: SearchSpace,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress,
    time_limit: TimeLimit,
    batch_runs: int = 0,
    **objects: Any,
) -> SearchResult:
    """Search, or continue the same search in this folder.

    Args:
        space: What is searched.
        out: The output folder.
        overwrite: Replace an earlier search in the output folder.
        progress: Prints.
        time_limit: The time limit.
        batch_runs: The most runs in one stack; 0: as many as fit.
        objects: Model and data that were given as objects.

    Raises:
        InputError: The guess cannot be used, or the folder holds another search.
    """
    space = replace(space, key=FLAGS.get(space.key, space.key))
    space.check()
    entries = _new_entries(space, "half", FIRST, [])
    cells = space.plan([entry["value"] for entry in entries])
    if not overwrite and _holds_search(out):
        _check_same(Comparison(out), space, cells)
        return resume_search(out, progress=progress, time_limit=time_limit, **objects)
    start_comparison(
        cells,
        out,
        select="validation",
        overwrite=overwrite,
        progress=progress,
        time_limit=time_limit,
        batch_runs=batch_runs,
        tables=_table(space, entries),
        **objects,
    )
    return _go_on(space, SafePath.of(out), progress, time_limit, objects)


def resume_search(
    folder: Path | SafePath, *, progress: Progress, time_limit: TimeLimit, **objects: Any
) -> SearchResult:
    """Run what is unfinished, then what the results ask for."""
    folder = SafePath.of(folder)
    resume_comparison(folder, progress=progress, time_limit=time_limit, **objects)
    found = SearchResult(Comparison(folder))
    cells = found.comparison.cells
    space = SearchSpace(
        found.comparison.plan["experiments"][cells[0]["name"]],
        {},
        cells[0]["method"],
        list(dict.fromkeys(cell["seed"] for cell in cells)),
        found.key,
        found.around,
    )
    return _go_on(space, folder, progress, time_limit, objects)


def _go_on(
    space: SearchSpace,
    folder: SafePath,
    progress: Progress,
    time_limit: TimeLimit,
    objects: Mapping[str, Any],
) -> SearchResult:
    """Repeat: add the values that the results ask for, and run them."""
    while True:
        found = SearchResult(Comparison(folder))
        (folder / TABLE).write(json.dumps(found.as_dict(), indent=2).encode())
        entries = _next_entries(space, found)
        if not entries:
            return found
        values = [entry["value"] for entry in entries]
        progress.log(f"{found.describe()}; next: {', '.join(map(str, values))}")
        table = _table(space, [*found.entries, *entries])
        extend_comparison(folder, space.plan(values), table)
        resume_comparison(folder, progress=progress, time_limit=time_limit, **objects)


def _next_entries(space: SearchSpace, found: SearchResult) -> list[dict[str, Any]]:
    """The values to try next; none where the search is done."""
    if found.best is None:
        return []
    place = next(e["position"] for e in found.entries if e["value"] == found.best)
    beyond = sum(entry["stage"] == "beyond" for entry in found.entries)
    entries: list[dict[str, Any]] = []
    if found.edge and beyond < MAX_BEYOND:
        step = -HALF if found.edge == "smallest" else HALF
        entries = _new_entries(space, "beyond", [place + step], found.entries)
    if not entries and all(entry["stage"] != "quarter" for entry in found.entries):
        around = [place - QUARTER, place + QUARTER]
        entries = _new_entries(space, "quarter", around, found.entries)
    return entries


def _new_entries(
    space: SearchSpace, stage: str, positions: Sequence[int], old: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Values that the setting takes and that were not tried, as the plan lists them."""
    entries: list[dict[str, Any]] = []
    tried = {entry["value"] for entry in old}
    for position in positions:
        value = space.value_at(position)
        if value is not None and value not in tried:
            tried.add(value)
            setting = space.plan([value])[0].setting
            entries.append(
                {"value": value, "position": position, "stage": stage, "setting": setting}
            )
    return entries


def _table(space: SearchSpace, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {SEARCH: {"key": space.key, "around": space.around, "tried": list(entries)}}


def _holds_search(out: Path) -> bool:
    return (SafePath.of(out) / COMPARISON).is_regular_file() and SEARCH in Comparison(out).plan


def _check_same(there: Comparison, space: SearchSpace, cells: Sequence[GridPoint]) -> None:
    """Refuse to continue a search with other settings."""
    found = SearchResult(there)
    asked = {cell.name: cell.config.model_dump(mode="json", exclude_none=True) for cell in cells}
    names = [cell["name"] for cell in there.cells if cell["name"] in asked]
    if (
        (found.key, found.around) != (space.key, space.around)
        or {cell["seed"] for cell in there.cells} != set(space.seeds)
        or {name: there.plan.get("experiments", {}).get(name) for name in names} != asked
    ):
        raise InputError(
            f"{there.folder} holds a search with other settings: choose another --out, or replace"
            " it with --overwrite"
        )
    foreign = sorted(import_paths(there.settings) - import_paths(asked))
    if foreign:  # this command allows the code that it names
        raise InputError(
            f"{there.folder} imports and runs Python code ({foreign[0]}) that this search does not"
            " name: choose another --out, or replace it with --overwrite"
        )
