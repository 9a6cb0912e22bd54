"""A comparison: methods x settings x seeds on the same data and the same samples of clients.

Every combination is a run with a folder of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

from remanence.config import Experiment, parse_experiment
from remanence.core.errors import InputError
from remanence.core.files import (
    check_output_dir,
    create_output_dir,
    folder_name,
    lock,
    translate_disk_errors,
)
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import Progress
from remanence.core.safe_path import SafePath
from remanence.core.slots import Method
from remanence.data.dataset import ArrayDataset
from remanence.engines.autotune import EngineChoice
from remanence.experiment.build import build, check_names
from remanence.experiment.resources import check_disk
from remanence.results.readers import corrupt_file
from remanence.results.run import COMPARISON, EXPERIMENT, RUNS, Comparison, Run
from remanence.rounds.engine_choice import resolve_engine
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.axes import check_axes, expand
from remanence.sweeps.scheduler import QueuedRun, run_all, workload_of

MAX_RUNS = 10_000


@dataclass(frozen=True)
class GridPoint:
    """One run of a comparison."""

    name: str  # of its folder
    method: str
    setting: str  # the grid's values as text; empty without a grid
    condition: str  # those of them that validation data do not select
    seed: int
    config: Experiment
    given: Method | None = None  # an object in place of the method that the settings name


@preserve_process_state()
def plan_grid(
    base: Mapping[str, Any],
    changes: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    objects: Mapping[str, Method] | None = None,
) -> list[GridPoint]:
    """Every combination, checked.

    Seeds are innermost, so that a method's first results come early.

    Args:
        base: The experiment.
        changes: Keys that differ from it in all runs.
        methods: To compare.
        seeds: Of each method and setting.
        grid: Values by key, a setting or an option of a part such as `fedprox.mu`; every
            combination is a run.
        objects: Methods that were given as objects, by their text in `methods`.

    Raises:
        InputError: The runs would not differ as their labels say, or a setting is invalid.
    """
    _check_plan(methods, seeds, changes, grid)
    settings = {method: expand(method, grid) for method in methods}
    count = sum(map(len, settings.values())) * len(seeds)
    if count > MAX_RUNS:
        raise InputError(
            f"{count} runs are too many for one comparison ({MAX_RUNS} at most): make the grid"
            " smaller"
        )
    cells = []
    for method, setting in ((m, setting) for m in methods for setting in settings[m]):
        given = (objects or {}).get(method)
        if given is not None and setting.method != method:
            raise InputError(
                f"the grid varies an option of {method}, which is given as an object: give it as"
                " text, or give one object for each value"
            )
        fixed = {**changes, **setting.changes, "method": setting.method}
        for seed in seeds:
            config = parse_experiment(base, {**fixed, "seed": seed})
            name = folder_name(f"{method} {setting.text} seed{seed}")
            texts = (setting.text, setting.condition)
            cells.append(GridPoint(name, method, *texts, seed, config, given))
        check_names(cells[-1].config, given)
    names = Counter(cell.name for cell in cells)
    return [
        c if names[c.name] == 1 else replace(c, name=f"{c.name}-{i}") for i, c in enumerate(cells)
    ]


def _check_plan(
    methods: Sequence[str],
    seeds: Sequence[int],
    changes: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
) -> None:
    """Refuse what is given twice, or as a setting where it is an axis."""
    if not methods:
        raise InputError('no methods to compare: write --methods "fedavg; fedavg+wsm"')
    repeated = [method for method in methods if methods.count(method) > 1]
    if repeated:
        raise InputError(f"method {repeated[0]!r} is given twice: write it once")
    for key, option in (("method", "--methods"), ("seed", "--seeds")):
        if key in changes or key in grid:
            raise InputError(f"a comparison does not take {key} as a setting: use {option}")
    twice = next((seed for place, seed in enumerate(seeds) if seed in seeds[:place]), None)
    if twice is not None:
        raise InputError(f"seed {twice} is given twice: write it once")
    check_axes(methods, grid)


@preserve_process_state()
def start_comparison(
    cells: Sequence[GridPoint],
    out: Path,
    *,
    select: str = "all",
    overwrite: bool = False,
    progress: Progress,
    time_limit: TimeLimit,
    batch_runs: int = 0,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Comparison:
    """Check everything, create the folder, and run every grid point.

    Args:
        cells: The grid points.
        out: The output folder.
        select: How reports select a method's setting: "validation" or "all".
        overwrite: Replace a comparison in this folder.
        progress: Prints.
        time_limit: The time limit.
        batch_runs: The most runs in one stack; 0: as many as fit.
        module: Takes the place of the network.
        source: Takes the place of the data.
        tables: More tables of the plan.
    """
    if select == "validation" and cells[0].config.data.validation == 0:
        raise InputError(
            "the settings of a grid are compared on validation data, and there are none: set"
            " data.validation above 0, or show all settings with --select all"
        )
    check_output_dir(out, overwrite, (EXPERIMENT, COMPARISON))
    # one engine for all runs, so that only the method differs between them
    first = build(cells[0].config, method=cells[0].given, module=module, source=source)
    check_disk(first.resources, out, len(cells))
    workload = workload_of([cell.config for cell in cells])
    _, choice = resolve_engine(first, progress, workload=workload)
    plan = {
        "select": select,
        "engine": choice._asdict(),
        "batch_runs": batch_runs,
        **(tables or {}),
        **_describe_cells(cells),
    }
    create_output_dir(out, overwrite, (EXPERIMENT, COMPARISON))
    folder = SafePath.of(out)
    with translate_disk_errors(folder, resumable=True), lock(folder):
        (folder / COMPARISON).write(tomli_w.dumps(plan).encode())
        _run_grid(cells, folder, choice, progress, time_limit, batch_runs, module, source)
    return Comparison(folder)


def _describe_cells(cells: Sequence[GridPoint]) -> dict[str, Any]:
    """The entries of the plan that say what runs."""
    return {
        "cells": [
            {
                "name": c.name,
                "method": c.method,
                "setting": c.setting,
                "condition": c.condition,
                "seed": c.seed,
            }
            for c in cells
        ],
        "experiments": {c.name: c.config.model_dump(mode="json", exclude_none=True) for c in cells},
    }


def extend_comparison(
    folder: Path | SafePath, cells: Sequence[GridPoint], tables: Mapping[str, Any]
) -> None:
    """Add grid points to the plan of a comparison; `resume_comparison` runs them.

    Args:
        folder: Of the comparison.
        cells: New ones, whose names no other cell has.
        tables: Tables of the plan to replace.
    """
    folder = SafePath.of(folder)
    with translate_disk_errors(folder, resumable=True), lock(folder):
        plan, more = Comparison(folder).plan, _describe_cells(cells)
        plan = {
            **plan,
            **tables,
            "cells": [*plan["cells"], *more["cells"]],
            "experiments": {**plan["experiments"], **more["experiments"]},
        }
        (folder / COMPARISON).write(tomli_w.dumps(plan).encode())


@preserve_process_state()
def resume_comparison(
    folder: Path | SafePath,
    *,
    progress: Progress,
    time_limit: TimeLimit,
    methods: Mapping[str, Method] | None = None,
    module: nn.Module | None = None,
    source: ArrayDataset | None = None,
) -> Comparison:
    """Resume the runs that are unfinished and start those that are missing; `methods` are those
    that were given as objects, by their text.
    """
    folder = SafePath.of(folder)
    plan = Comparison(folder).plan
    if "experiments" not in plan:
        raise corrupt_file(folder / COMPARISON, "it does not describe its runs")
    cells = [
        GridPoint(
            c["name"],
            c["method"],
            c.get("setting", ""),
            c.get("condition", ""),
            c["seed"],
            parse_experiment(plan["experiments"][c["name"]]),
            (methods or {}).get(c["method"]),
        )
        for c in plan["cells"]
    ]
    choice = _read_choice(folder, plan)
    with translate_disk_errors(folder, resumable=True), lock(folder):
        done = _run_grid(
            cells,
            folder,
            choice,
            progress,
            time_limit,
            int(plan.get("batch_runs", 0)),
            module,
            source,
        )
    return Comparison(folder, [entry for run in done for entry in run.resumptions])


def _read_choice(folder: SafePath, plan: Mapping[str, Any]) -> EngineChoice:
    """The engine that was chosen for all runs; the plan may come from another person."""
    try:
        choice = EngineChoice(**plan["engine"])
        settings = {"engine": choice.name, "threads": choice.threads, "stack_size": choice.stack}
        parse_experiment({}, settings | {"execution": choice.execution})
    except (KeyError, TypeError, InputError):
        raise corrupt_file(
            folder / COMPARISON, "its engine is unknown or has unknown settings"
        ) from None
    return choice


def _run_grid(
    cells: Sequence[GridPoint],
    out: SafePath,
    choice: EngineChoice,
    progress: Progress,
    time_limit: TimeLimit,
    batch_runs: int,
    module: nn.Module | None,
    source: ArrayDataset | None,
) -> list[Run]:
    runs = []
    for number, cell in enumerate(cells, 1):
        folder = out / RUNS / cell.name
        if not (folder / EXPERIMENT).is_regular_file() or not Run(folder).finished:
            title = (
                f"[{number}/{len(cells)}]"
                f" {cell.method}{' ' + cell.setting if cell.setting else ''}, seed {cell.seed}"
            )
            runs.append(QueuedRun(folder, cell.config, title, method=cell.given))
    resume_command = f"remanence resume {out}"
    return run_all(
        runs,
        {"": choice},
        resume_command,
        progress=progress,
        time_limit=time_limit,
        batch_runs=batch_runs,
        module=module,
        source=source,
    )
