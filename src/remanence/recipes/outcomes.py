"""Stored results: `outcome.json` of a folder that `remanence reproduce` wrote."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from remanence.core.errors import InputError
from remanence.core.safe_path import SafePath
from remanence.recipes.claims import Place, evaluate_claims, measured_cells, place_of
from remanence.recipes.loader import load_recipe
from remanence.recipes.plan import ResultPlan, make_plan
from remanence.recipes.recipe import NEVER, CellNumber, Recipe
from remanence.recipes.tables import ResultOutcome
from remanence.recipes.verdicts import Basis
from remanence.results.readers import read_json

OUTCOME = "outcome.json"
LARGEST_OUTCOME = 64 << 20  # bytes
# entries that `read_outcome` needs
REQUIRED = (
    "result",
    "scale",
    "absent",
    "seeds",
    "only",
    "changes",
    "substitute_data",
    "numbers",
    "notes",
    "machine",
    "seconds",
)


class StoredResult(NamedTuple):
    """A result that is shown on a page."""

    name: str  # of its folder in outcomes/
    outcome: ResultOutcome
    metadata: Mapping[str, Any]  # the content of outcome.json
    figure_data: str = ""  # the content of figure.csv
    picture: bytes | None = None  # the figure as PNG


def read_outcome(folder: Path) -> tuple[ResultOutcome, dict[str, Any]]:
    """Read a stored result; its runs are not needed.

    Returns:
        The result, and the whole content of `outcome.json`.
    """
    try:
        metadata = read_json(SafePath.of(folder) / OUTCOME, LARGEST_OUTCOME)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON
        raise _damaged(folder, str(error)) from None
    if metadata is None:
        raise InputError(
            f"{folder} has no {OUTCOME}: give folders that remanence reproduce has finished"
        )
    if not isinstance(metadata, dict):
        raise _damaged(folder, "it is not an object")
    missing = [name for name in REQUIRED if name not in metadata]
    if missing:
        raise _damaged(folder, f"it has no {missing[0]}")
    recipe = load_recipe(metadata["result"])
    plan = make_plan(
        recipe,
        metadata["scale"],
        absent=metadata["absent"],
        seeds=metadata["seeds"],
        only=metadata["only"],
        changes=metadata["changes"],
        substitute_data=metadata["substitute_data"],
    )
    ours, trained = {}, {}
    for row, column, value, deviation, text, rounds, seeds in metadata["numbers"]:
        ours[row, column] = CellNumber(math.inf if text == NEVER else value, deviation, text)
        trained[row, column] = rounds, seeds
    notes = {(row, column): note for row, column, note in metadata["notes"]}
    return make_outcome(plan, ours, notes, trained), metadata


def make_outcome(
    plan: ResultPlan,
    ours: Mapping[Place, CellNumber],
    notes: Mapping[Place, str],
    trained: Mapping[Place, tuple[int, int]],
) -> ResultOutcome:
    """A result with its verdicts.

    Args:
        plan: Its plan.
        ours: Our numbers.
        notes: On single cells.
        trained: The rounds and the seeds behind our numbers.
    """
    published = _published_rounds(plan.recipe)
    bases = {
        place: Basis(rounds, published[place], seeds)
        for place, (rounds, seeds) in trained.items()
        if place in published and seeds and ours.get(place, CellNumber()).known
    }
    # scale smoke only shows that a recipe runs
    tested = {} if plan.scale == "smoke" else bases
    verdicts = tuple(evaluate_claims(plan.recipe, ours, tested))
    return ResultOutcome(plan, ours, notes, bases, verdicts)


def _published_rounds(recipe: Recipe) -> dict[Place, int]:
    """The round that every number of the paper is of."""
    plan = make_plan(recipe, "paper")
    rounds = {
        (row.label, column.label): plan.rounds_of(row, column)
        for row in plan.rows
        for column in plan.columns
    }
    measured = {
        place_of(claim, row, column): rounds[row.label, column.label]
        for (row, column), claim in measured_cells(recipe)
    }
    return rounds | measured


def write_numbers(outcome: ResultOutcome) -> list[list[Any]]:
    """The numbers of a result with what they rest on, as `outcome.json` has them."""
    rows: list[list[Any]] = []
    for place, number in outcome.ours.items():
        basis = outcome.bases.get(place)
        value = None if number.text == NEVER else number.value
        behind = [0, 0] if basis is None else [basis.rounds, basis.seeds]
        rows.append([*place, value, number.deviation, number.text, *behind])
    return rows


def _damaged(folder: Path, reason: str) -> InputError:
    return InputError(
        f"{folder / OUTCOME} is damaged ({reason}): run the same remanence reproduce again, which"
        " skips finished runs"
    )


def name_outcome(metadata: Mapping[str, Any]) -> str:
    """The folder name of a stored result: result, scale, and a hash of the settings.

    The same result may be stored at several lengths. The rows are not part of the name, so that a
    result with more rows replaces one with fewer.
    """
    changes = sorted(
        (key, value) for key, value in metadata["changes"].items() if key != "data.dir"
    )
    settings = json.dumps([metadata["seeds"], metadata["substitute_data"], changes])
    digest = hashlib.sha256(settings.encode()).hexdigest()[:6]
    return f"{metadata['result'].replace('/', '-')}-{metadata['scale']}-{digest}"


def command_of(metadata: Mapping[str, Any]) -> str:
    """The command that produced a result."""
    words = [f"remanence reproduce {metadata['result']} --scale {metadata['scale']}"]
    words += [f'--only "{label}"' for label in metadata["only"]]
    words += [f"--seeds {metadata['seeds']}"] if metadata["seeds"] is not None else []
    words += [
        f"--set {key}={json.dumps(value)}"
        for key, value in metadata["changes"].items()
        if key != "data.dir"
    ]
    words += ["--substitute-data"] if metadata["substitute_data"] else []
    return " ".join([*words, "--out DIR"])
