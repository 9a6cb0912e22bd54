"""The folder that `remanence reproduce` writes to. As a whole it is a comparison, so that
`remanence report` can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from remanence.core.errors import InputError
from remanence.core.files import create_output_dir, translate_disk_errors
from remanence.core.safe_path import SafePath
from remanence.engines.autotune import EngineChoice
from remanence.recipes.plan import PlannedRun, ResultPlan, source_of
from remanence.results.manifest import CHECKPOINTS
from remanence.results.run import COMPARISON, EXPERIMENT, RUNS, Comparison, Run
from remanence.sweeps.scheduler import QueuedRun

FIXED = ("result", "scale", "substitute_data", "changes")  # of a request; the same in one folder


def open_folder(plan: ResultPlan, folder: Path, request: Mapping[str, Any]) -> None:
    """Create the folder, or continue in one of the same result. Rows and seeds may be added;
    anything else would be another result.
    """
    cells = {
        run.name: {
            "name": run.name,
            "method": run.row,
            "setting": _describe_setting(plan, run),
            "seed": run.seed,
        }
        for run in plan.runs
    }
    experiments = {
        run.name: run.experiment.model_dump(mode="json", exclude_none=True) for run in plan.runs
    }
    comparison: dict[str, Any] = {
        "select": "all",
        "engine": EngineChoice("sequential", 1, "sequential: the plainest")._asdict(),
        "reproduce": {key: request[key] for key in FIXED},
    }
    out = SafePath.of(folder)
    if (out / COMPARISON).is_regular_file():
        old = Comparison(out).plan
        _check_same_result(out, old, comparison["reproduce"], experiments)
        cells = {cell["name"]: cell for cell in old["cells"]} | cells
        experiments = old["experiments"] | experiments
    else:
        create_output_dir(folder, False, (EXPERIMENT, COMPARISON))
    comparison |= {"cells": list(cells.values()), "experiments": experiments}
    with translate_disk_errors(out):
        (out / COMPARISON).write(tomli_w.dumps(comparison).encode())


def find_reusable(folders: Sequence[Path]) -> list[tuple[dict[str, Any], Run]]:
    """The finished runs of other results, each with its settings.

    Args:
        folders: Of `remanence reproduce`.
    """
    found = []
    for folder in folders:
        if not (SafePath.of(folder) / COMPARISON).is_regular_file():
            raise InputError(
                f"{folder} has no runs to use: give a folder that remanence reproduce wrote"
            )
        other = Comparison(folder)
        experiments = other.plan.get("experiments") or {}
        found += [
            (_without_data_dir(experiments[run.folder.name]), run)
            for run in other.runs
            if run.folder.name in experiments and is_done(run)
        ]
    return found


def copy_runs(plan: ResultPlan, out: Path, reusable: Sequence[tuple[dict[str, Any], Run]]) -> None:
    """Copy the runs whose settings equal those of a planned run that has not begun, without their
    checkpoints. Settings are equal if only the data folder differs.
    """
    for planned in plan.runs:
        folder = SafePath.of(out) / RUNS / planned.name
        wanted = _without_data_dir(planned.experiment.model_dump(mode="json", exclude_none=True))
        run = next((run for settings, run in reusable if settings == wanted), None)
        if run is None or (folder / EXPERIMENT).is_regular_file():
            continue
        (SafePath.of(out) / RUNS).make_folder()
        folder.write_folder({name: (run.files / name).read() for name in run.files.list_files()})


def queue_runs(plan: ResultPlan, out: Path) -> list[QueuedRun]:
    """The runs of a plan that are not finished yet."""
    runs = [
        _queue_run(run, SafePath.of(out), f"[{number}/{len(plan.runs)}]")
        for number, run in enumerate(plan.runs, 1)
    ]
    return [run for run in runs if not run.started or not is_done(Run(run.folder))]


def is_done(run: Run) -> bool:
    """Whether the last round is saved. Without checkpoints, which may have been deleted to save
    space, the metrics decide.
    """
    return run.finished or (not (run.files / CHECKPOINTS).is_folder() and run.reached_end)


def _check_same_result(
    out: SafePath,
    old: Mapping[str, Any],
    request: Mapping[str, Any],
    experiments: Mapping[str, Mapping[str, Any]],
) -> None:
    if old.get("reproduce") != request:
        raise InputError(f"{out} has another result, scale or setting: choose another --out")
    changed = [
        name
        for name in experiments
        if name in old["experiments"]
        and _without_data_dir(old["experiments"][name]) != _without_data_dir(experiments[name])
    ]
    if changed:
        raise InputError(
            f"{out} has a run {changed[0]} of another version of this recipe: choose another --out"
        )


def _without_data_dir(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment without the folder of its data and the memory for reading them, which differ
    between machines.
    """
    return {**experiment, "data": {**experiment["data"], "dir": "", "max_bytes": 0}}


def _describe_setting(plan: ResultPlan, run: PlannedRun) -> str:
    parts = [run.column] if len(plan.recipe.columns) > 1 else []
    parts += [run.setting] if run.setting else []
    if run.substitute:
        parts.append(f"{source_of(run.experiment)} as substitute for {run.substitute}")
    return ", ".join(parts)


def _queue_run(run: PlannedRun, out: SafePath, count: str) -> QueuedRun:
    experiment = run.experiment
    # all methods on the same task use one engine, so that only the method differs between them
    task = (
        f"{experiment.model} {experiment.data.model_dump_json()}"
        f" {experiment.clients.model_dump_json()} {'centralized' in experiment.method}"
    )
    title = f"{count} {run.row}, {run.column}, seed {run.seed}"
    return QueuedRun(out / RUNS / run.name, experiment, title, task)
