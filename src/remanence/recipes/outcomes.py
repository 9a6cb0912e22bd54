"""Stored results: `outcome.json` of a folder that `remanence reproduce` wrote."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError
from remanence.core.safe_path import SafePath
from remanence.recipes.claims import evaluate_claims
from remanence.recipes.loader import load_recipe
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import NEVER, CellNumber
from remanence.recipes.tables import ResultOutcome
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
    ours = {
        (row, column): CellNumber(math.inf if text == NEVER else value, deviation, text)
        for row, column, value, deviation, text in metadata["numbers"]
    }
    notes = {(row, column): note for row, column, note in metadata["notes"]}
    return ResultOutcome(plan, ours, notes, tuple(evaluate_claims(recipe, ours))), metadata


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
