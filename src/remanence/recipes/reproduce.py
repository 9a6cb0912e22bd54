"""`remanence reproduce wsm/table-3.2`: run what a result of a paper takes, then write its table
with our numbers beside the published ones.

DIR/runs/...          a run folder for every run; DIR as a whole is a comparison, so `remanence
report DIR` works DIR/outcome.json      what was asked for, the numbers, machine and time: what
docs/results is made from DIR/result.md .csv    the table in the paper's layout, and whether the
claims hold DIR/figure.csv        for a figure, the data in it DIR/figure.png        and the figure,
in the paper's layout, where matplotlib is installed; DIR/report.html draws everything there is
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from remanence.core.errors import InputError, Stopped
from remanence.core.files import create_output_dir, lock, translate_disk_errors, write_atomically
from remanence.core.progress import NullProgress, Progress
from remanence.data.downloads import download_hint, is_missing
from remanence.engines.autotune import EngineChoice
from remanence.experiment.build import check_names
from remanence.recipes.evaluate_cells import collect, find_finished
from remanence.recipes.figure_data import FIGURE, PICTURE, figure_csv
from remanence.recipes.loader import load_recipe
from remanence.recipes.plan import PlannedRun, ResultPlan, make_plan, source_of
from remanence.recipes.recipe import SCALES, Recipe
from remanence.recipes.results_pages import OUTCOME, describe_result
from remanence.recipes.tables import ResultOutcome, as_csv
from remanence.report import write_report
from remanence.results.run import CHECKPOINTS, COMPARISON, RUNS, SPEC, Comparison, Run
from remanence.rounds.loop import TimeLimit
from remanence.sweeps.scheduler import QueuedRun, run_all
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
    """The runs of a result, with what is not there left out or replaced. only_to_look: where
    none of the data are there, all runs, as if they were.
    """
    if scale not in SCALES:
        raise InputError(f"unknown scale {scale!r}: {', '.join(SCALES)}")
    recipe = load_recipe(name)
    root = data_dir or os.environ.get("REMANENCE_DATA", "")
    wanted = {**(changes or {}), **({"data.dir": root} if root else {})}
    needed = {
        source_of(run.spec) for run in make_plan(recipe, scale, only=only, changes=wanted).runs
    } | {entry.set.get("data.name", "").partition("(")[0] for entry in recipe.substitutes.values()}
    absent = sorted(
        source for source in needed if is_missing(source, Path(root).expanduser() if root else None)
    )
    plan = make_plan(
        recipe,
        scale,
        seeds=seeds,
        only=only,
        changes=wanted,
        absent=absent,
        substitute_data=substitute_data,
    )
    if not plan.runs:
        if not dry_run:
            raise InputError(
                missing_data_message(
                    recipe,
                    next(
                        place.missing_data for place in plan.places.values() if place.missing_data
                    ),
                )
            )
        plan = replace(
            make_plan(recipe, scale, seeds=seeds, only=only, changes=wanted), places=plan.places
        )
    for run in plan.runs:
        check_names(run.spec)
    return plan


def missing_data_message(recipe: Recipe, source: str) -> str:
    """Why nothing can be run, and what to do."""
    offer = (
        f"; or run the stand-in, with --substitute-data: {recipe.substitutes[source].about}"
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
    deadline: TimeLimit | None = None,
    batch_runs: int = 0,
    report: bool = True,
) -> ResultOutcome:
    """Run what is not yet done of a result, and write it: our numbers beside the published ones,
    and whether the claims hold.

    changes: keys of the experiment that are to be otherwise, such as {"rounds": 500}. batch_runs: the
        most runs in one stack, 0 for as many as fit.
    report: also write report.html, which draws everything. The same call goes on where it was
        stopped.
    """
    plan = plan_result(
        name,
        scale=scale,
        only=only,
        seeds=seeds,
        substitute_data=substitute_data,
        changes=changes,
        data_dir=data_dir,
    )
    absent = sorted(
        {
            source
            for place in plan.places.values()
            for source in (place.missing_data, place.substitute)
            if source
        }
    )
    asked = {
        "result": name,
        "scale": scale,
        "seeds": seeds,
        "only": list(only),
        "changes": dict(changes or {}),
        "substitute_data": substitute_data,
        "absent": absent,
    }
    _open_folder(plan, out, asked)
    with translate_disk_errors(out), lock(out):
        runs = [
            _plan_run(wanted, out, f"[{number}/{len(plan.runs)}]")
            for number, wanted in enumerate(plan.runs, 1)
        ]
        left = [run for run in runs if not run.started or not is_done(Run(run.folder))]
        try:
            run_all(
                left,
                {},
                "the same command",
                progress=progress or NullProgress(),
                deadline=deadline or TimeLimit(None),
                batch_runs=batch_runs,
            )
        except Stopped:
            write_result(plan, out, asked)  # what is done so far can be read
            raise
        outcome = write_result(plan, out, asked)
    if report:
        write_report(out)
        write_figure(outcome, out)
    return outcome


def write_result(plan: ResultPlan, out: Path, asked: Mapping[str, Any]) -> ResultOutcome:
    """Table, claims and figure from the run folders; what is not finished is left out and said
    so.
    """
    finished = find_finished(plan, out)
    outcome, cells = collect(plan, finished)
    runs = list(finished.values())
    about = {
        **asked,
        "remanence": __version__,
        "machine": ", ".join(
            sorted({str(run.metadata.get("machine", "a machine not written down")) for run in runs})
        ),
        "seconds": round(sum(_seconds(run) for run in runs), 1),
        "runs": len(runs),
        "numbers": [
            [
                *place,
                None if number.text == "never" else number.value,
                number.deviation,
                number.text,
            ]
            for place, number in outcome.ours.items()
        ],
        "notes": [[*place, note] for place, note in outcome.notes.items()],
    }
    write_atomically(out / OUTCOME, json.dumps(about, indent=1, allow_nan=False).encode())
    write_atomically(out / PAGE, describe_result(outcome, about).encode())
    write_atomically(out / TABLE, as_csv(outcome).encode())
    if plan.recipe.figure_kind:
        write_atomically(out / FIGURE, figure_csv(plan.recipe.figure_kind, cells).encode())
    return outcome


def write_figure(outcome: ResultOutcome, out: Path) -> None:
    """The figure that the result is, from its data."""
    recipe = outcome.plan.recipe
    if not recipe.figure_kind or importlib.util.find_spec("matplotlib") is None:
        return
    from remanence.recipes.figure_plots import draw_figure

    picture = draw_figure(
        recipe.figure_kind, (out / FIGURE).read_text(encoding="utf-8"), recipe.title
    )
    if picture is not None:
        write_atomically(out / PICTURE, picture)


def _open_folder(plan: ResultPlan, out: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder, or go on in one of the same result; rows and seeds may be added,
    anything else would be another result.
    """
    cells = {
        run.name: {
            "name": run.name,
            "method": run.row,
            "setting": _setting(plan, run),
            "seed": run.seed,
        }
        for run in plan.runs
    }
    specs = {run.name: run.spec.model_dump(mode="json", exclude_none=True) for run in plan.runs}
    same = ("result", "scale", "substitute_data", "changes")
    written: dict[str, Any] = {
        "select": "last",
        "engine": EngineChoice("sequential", 1, "sequential: the plainest")._asdict(),
        "reproduce": {key: asked[key] for key in same},
    }
    if (out / COMPARISON).exists():
        old = Comparison(out).plan
        if old.get("reproduce") != written["reproduce"]:
            raise InputError(f"{out} holds another result, scale or setting: choose another --out")
        changed = [
            name
            for name in specs
            if name in old["specs"]
            and _without_data_dir(old["specs"][name]) != _without_data_dir(specs[name])
        ]
        if changed:
            raise InputError(
                f"{out} holds a run {changed[0]} of another version of this recipe: choose"
                " another --out"
            )
        cells = {cell["name"]: cell for cell in old["cells"]} | cells
        specs = old["specs"] | specs
    else:
        create_output_dir(out, False, (SPEC, COMPARISON))
    with translate_disk_errors(out):
        write_atomically(
            out / COMPARISON,
            tomli_w.dumps(written | {"cells": list(cells.values()), "specs": specs}).encode(),
        )


def _without_data_dir(spec: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment without the place of its data: a folder may be carried to another machine."""
    return {**spec, "data": {**spec["data"], "dir": ""}}


def _setting(plan: ResultPlan, run: PlannedRun) -> str:
    words = [run.column] if len(plan.recipe.columns) > 1 else []
    words += [run.setting] if run.setting else []
    words += [f"{source_of(run.spec)} as stand-in for {run.substitute}"] if run.substitute else []
    return ", ".join(words)


def _plan_run(wanted: PlannedRun, out: Path, count: str) -> QueuedRun:
    spec = wanted.spec
    # one engine for all methods on the same task: what differs between them is then the method
    # alone
    task = (
        f"{spec.model} {spec.data.model_dump_json()} {spec.clients.model_dump_json()}"
        f" {'centralized' in spec.method}"
    )
    return QueuedRun(
        out / RUNS / wanted.name,
        spec,
        f"{count} {wanted.row}, {wanted.column}, seed {wanted.seed}",
        task,
    )


def is_done(run: Run) -> bool:
    """Is the last round saved? Where the weights were thrown away to save space, the metrics
    tell.
    """
    return run.finished or (not (run.folder / CHECKPOINTS).exists() and run.reached_end)


def _seconds(run: Run) -> float:
    """A round's lines, one a split, repeat its time: it counts once."""
    return sum(
        {int(line["round"]): float(line.get("seconds") or 0.0) for line in run.metrics}.values()
    )
