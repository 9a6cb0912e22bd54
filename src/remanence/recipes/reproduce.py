"""`remanence reproduce wsm/table-3.2`: the runs of a recipe, and the result with our numbers beside
the published ones. The output folder has

- `runs/...`: a folder for each run; `report.html`: the report about all of them
- `outcome.json`: request, numbers, machine and time; docs/results is made from it
- `result.md`, `result.csv`: the table in the paper's layout, and whether the claims hold
- `figure.csv`, `figure.png`: for a figure, its data and the figure (if matplotlib is installed)
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from remanence.core import expressions
from remanence.core.errors import InputError, Stopped, unknown
from remanence.core.files import lock, translate_disk_errors
from remanence.core.progress import NullProgress, Progress
from remanence.core.safe_path import SafePath
from remanence.data.downloads import download_hint, is_missing
from remanence.experiment.build import check_names
from remanence.recipes.evaluate_cells import collect, find_finished
from remanence.recipes.figure_data import FIGURE, PICTURE, figure_csv
from remanence.recipes.loader import load_recipe
from remanence.recipes.measures import FROM_ROUND_TO_ROUND
from remanence.recipes.outcomes import OUTCOME, write_numbers
from remanence.recipes.plan import ResultPlan, make_plan, source_of
from remanence.recipes.recipe import SCALES, Recipe
from remanence.recipes.results_pages import describe_result
from remanence.recipes.run_folder import copy_runs, find_reusable, open_folder, queue_runs
from remanence.recipes.tables import ResultOutcome, as_csv
from remanence.report import write_report
from remanence.results.run import Run
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.scheduler import run_all
from remanence.version import __version__

PAGE, TABLE = "result.md", "result.csv"


def plan_result(
    name: str,
    *,
    scale: str = "desk",
    only: Sequence[str] = (),
    seeds: int | None = None,
    substitute_data: bool = False,
    changes: Mapping[str, Any] | None = None,
    data_dir: str = "",
    dry_run: bool = False,
) -> ResultPlan:
    """Plan the runs of a result. Cells whose data are missing are left out or use substitutes.

    Args:
        name: The recipe, such as `wsm/table-3.2`.
        scale: One of `SCALES`.
        only: Labels of rows or columns. Default: those of the scale.
        seeds: Number of seeds. Default: that of the scale.
        substitute_data: Use the recipe's substitutes for missing datasets.
        changes: Settings of the experiment to change, by dotted key.
        data_dir: Folder of the datasets. Default: the environment variable REMANENCE_DATA.
        dry_run: Plan all runs if every dataset is missing, instead of raising an error.

    Raises:
        InputError: A name is unknown, or no run is possible without the missing data.
    """
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    recipe = load_recipe(name)
    root = data_dir or os.environ.get("REMANENCE_DATA", "")
    changed = {**(changes or {}), **({"data.dir": root} if root else {})}
    plan = make_plan(
        recipe,
        scale,
        seeds=seeds,
        only=only,
        changes=changed,
        absent=_find_missing(recipe, make_plan(recipe, scale, only=only, changes=changed), root),
        substitute_data=substitute_data,
    )
    if not plan.runs:
        if not dry_run:
            missing = next(cell.missing_data for cell in plan.cells.values() if cell.missing_data)
            raise InputError(missing_data_message(recipe, missing))
        plan = replace(
            make_plan(recipe, scale, seeds=seeds, only=only, changes=changed), cells=plan.cells
        )
    for run in plan.runs:
        check_names(run.experiment)
    check_recorded_rounds(plan)
    return plan


def check_recorded_rounds(plan: ResultPlan) -> None:
    """Raise InputError where a measure is from round to round and its runs skip rounds."""
    every = {run.name: run.experiment.record.every for run in plan.runs}
    for row, column in itertools.product(plan.rows, plan.columns):
        measure = plan.measure_of(row, column).name
        names = [name for _, found in plan.cells[row.label, column.label].runs for name in found]
        skipping = [every[name] for name in names if every[name] > 1]
        if skipping and measure in FROM_ROUND_TO_ROUND:
            raise InputError(
                f"{plan.recipe.name}: {measure} compares every round with the one before, and"
                f" {row.label}, {column.label} would record every {skipping[0]} rounds: set"
                " record.every=1"
            )


def missing_data_message(recipe: Recipe, source: str) -> str:
    """The error for a missing dataset: how to get it, and whether there is a substitute."""
    offer = (
        f"; or use the substitute, with --substitute-data: {recipe.substitutes[source].description}"
        if source in recipe.substitutes
        else ""
    )
    return (
        f"{recipe.name} needs {source}, which is not in the data folder (--data-dir or"
        f" REMANENCE_DATA): {download_hint(source)}{offer}"
    )


def reproduce(
    name: str,
    out: Path,
    *,
    scale: str = "desk",
    only: Sequence[str] = (),
    seeds: int | None = None,
    substitute_data: bool = False,
    changes: Mapping[str, Any] | None = None,
    data_dir: str = "",
    progress: Progress | None = None,
    time_limit: TimeLimit | None = None,
    batch_runs: int = 0,
    runs_from: Sequence[Path] = (),
    report: bool = True,
) -> ResultOutcome:
    """Train the runs of a result that are not finished yet, and write the result. The same call
    continues after an interruption.

    Args:
        name: The recipe, with options as in `plan_result`.
        out: The output folder.
        progress: Reports progress. Default: none.
        time_limit: The time limit of the runs.
        batch_runs: Maximum number of runs trained as one batch. 0: as many as fit.
        runs_from: Output folders of other results. Their finished runs with the same settings are
            copied, not trained again.
        report: Also write the report and the figure.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "seeds": seeds,
        "only": list(only),
        "changes": dict(changes or {}),
        "substitute_data": substitute_data,
    }
    plan = plan_result(name, data_dir=data_dir, **options)
    request = {"result": name, **options, "absent": _list_missing(plan)}
    reusable = find_reusable(runs_from)
    open_folder(plan, out, request)
    with translate_disk_errors(out), lock(out):
        copy_runs(plan, out, reusable)
        try:
            run_all(
                queue_runs(plan, out),
                {},
                "the same command",
                progress=progress or NullProgress(),
                time_limit=time_limit or TimeLimit(None),
                batch_runs=batch_runs,
            )
        except Stopped:
            write_result(plan, out, request)  # with the runs that are finished so far
            raise
        outcome = write_result(plan, out, request)
    if report:
        write_report(out)
        write_figure(outcome, out)
    return outcome


def write_result(plan: ResultPlan, out: Path, request: Mapping[str, Any]) -> ResultOutcome:
    """Write table, claims and figure data from the runs that are finished, and return them."""
    finished = find_finished(plan, out)
    outcome, cells = collect(plan, finished)
    metadata = _describe_outcome(outcome, request, list(finished.values()))
    folder = SafePath.of(out)
    (folder / OUTCOME).write(json.dumps(metadata, indent=1, allow_nan=False).encode())
    (folder / PAGE).write(describe_result(outcome, metadata).encode())
    (folder / TABLE).write(as_csv(outcome).encode())
    if plan.recipe.figure_kind:
        data = figure_csv(plan.recipe.figure_kind, cells, **_figure_options(plan.recipe))
        (folder / FIGURE).write(data.encode())
    return outcome


def _figure_options(recipe: Recipe) -> dict[str, Any]:
    """A heat map is of the round that the recipe's measure reads."""
    options = expressions.parse_call(recipe.measure).arguments
    return {"at": options["at"]} if recipe.figure_kind == "heatmap" and "at" in options else {}


def write_figure(outcome: ResultOutcome, out: Path) -> None:
    """Draw the figure of a result from its data, if it is a figure and matplotlib is installed."""
    recipe = outcome.plan.recipe
    if not recipe.figure_kind or importlib.util.find_spec("matplotlib") is None:
        return
    from remanence.recipes.figure_plots import draw_figure

    data = (SafePath.of(out) / FIGURE).read().decode()
    png = draw_figure(recipe.figure_kind, data, recipe.title)
    if png is not None:
        (SafePath.of(out) / PICTURE).write(png)


def _find_missing(recipe: Recipe, plan: ResultPlan, root: str) -> list[str]:
    """The datasets of a plan and of the recipe's substitutes that are not in the data folder."""
    needed = {source_of(run.experiment) for run in plan.runs}
    for substitute in recipe.substitutes.values():
        needed.add(substitute.set.get("data.name", "").partition("(")[0])
    folder = Path(root).expanduser() if root else None
    return sorted(source for source in needed if is_missing(source, folder))


def _list_missing(plan: ResultPlan) -> list[str]:
    """The datasets that the cells of a plan miss, replaced or not."""
    cells = plan.cells.values()
    return sorted({cell.missing_data or cell.substitute for cell in cells} - {""})


def _describe_outcome(
    outcome: ResultOutcome, request: Mapping[str, Any], runs: Sequence[Run]
) -> dict[str, Any]:
    """The content of outcome.json."""
    machines = {str(run.metadata.get("machine", "an unknown machine")) for run in runs}
    return {
        **request,
        "remanence": __version__,
        "machine": ", ".join(sorted(machines)),
        "seconds": round(sum(_seconds(run) for run in runs), 1),
        "runs": len(runs),
        "numbers": write_numbers(outcome),
        "notes": [[*cell, note] for cell, note in outcome.notes.items()],
        "claims": [verdict.to_json() for verdict in outcome.verdicts],
    }


def _seconds(run: Run) -> float:
    """The seconds of all rounds. The lines of a round, one for each split, repeat its time."""
    return sum(
        {int(line["round"]): float(line.get("seconds") or 0.0) for line in run.metrics}.values()
    )
