"""The Python API: `rem.run(...)`, `rem.compare(...)`, `rem.search(...)`, `rem.resume(...)`."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, Unpack

from torch import nn

from remanence.analysis.actions import open_trusted
from remanence.analysis.results import ComparisonResult, RunResult
from remanence.config import (
    FLAGS,
    CommonSettings,
    Experiment,
    RunSettings,
    changes_from_flags,
    parse_experiment,
    read_file,
    with_settings,
)
from remanence.core.compose import describe
from remanence.core.errors import InputError, LearnedNothing
from remanence.core.expressions import split_top_level
from remanence.core.files import folder_name
from remanence.core.log_file import LoggedProgress
from remanence.core.progress import Progress, make_progress
from remanence.core.safe_path import SafePath
from remanence.core.slots import Method, Part
from remanence.data import from_dataset
from remanence.data.dataset import ArrayDataset
from remanence.results.run import SEARCH
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.grid import GridPoint, plan_grid, resume_comparison, start_comparison
from remanence.sweeps.search import SearchSpace, resume_search, search_values
from remanence.sweeps.search_result import SearchResult

Done = TypeVar("Done", RunResult, ComparisonResult)
ExperimentInput = Experiment | str | Path | Mapping[str, Any] | None


@with_settings(RunSettings)
def run(
    experiment: ExperimentInput = None,
    *,
    method: str | Method | Part | None = None,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    time_limit: float | None = None,
    allow_code: bool = False,
    set: Mapping[str, Any] | None = None,
    **flags: Unpack[RunSettings],
) -> RunResult:
    """Run one experiment.

    Args:
        experiment: An `Experiment`, an experiment file, or nested dictionaries like one. Default:
            the default settings.
        method: The method, as text or as an object such as `fedprox(mu=0.1) + wsm()`.
        model: The model, as text or as an `nn.Module`.
        data: The data, as text or a path, or an object that `rem.from_dataset` reads: a torch
            dataset, a pair of arrays (x, y), a data frame, or one of these for each site by name.
        out: The output folder. Default: a temporary folder, see `RunResult.folder`.
        overwrite: Replace an earlier run in the output folder.
        quiet: Print no progress.
        verbose: Print a line for every round, with all rejections.
        time_limit: Seconds after which the run saves itself and raises `Stopped`.
        allow_code: Accept an experiment file that names Python code to import and run,
            `package.module:name`. What arguments name always runs.
        set: Settings to change, by dotted key: `{"local.batch_size": 16}`.
        **flags: Settings to change: `rounds=20`, `lr=0.1`, or a section such as
            `local={"lr": 0.1, "drop_last": True}`:

    Returns:
        The finished run. Where it learned nothing or diverged, a `LearnedNothing` warning says
        why, and so do `RunResult.learned` and `RunResult.warnings`.

    Raises:
        InputError: A setting or a combination of settings is invalid.
    """
    objects, names = _objects(model, data)
    if isinstance(method, Method | Part):
        objects["method"] = _method(method)
        names["method"] = describe(objects["method"])
    elif method is not None:
        names["method"] = method
    changes = {**changes_from_flags({**names, **flags}), **(set or {})}
    folder = _output_folder(out)
    done = start_run(
        parse_experiment(_tree(experiment, allow_code), changes),
        folder,
        overwrite=overwrite,
        progress=_progress(folder, quiet, verbose),
        time_limit=TimeLimit(time_limit),
        **objects,
    )
    return _warn(RunResult(done.files))


@with_settings(CommonSettings)
def compare(
    methods: str | Method | Part | Sequence[str | Method | Part],
    *,
    experiment: ExperimentInput = None,
    seeds: int | Sequence[int] = 1,
    grid: Mapping[str, Sequence[Any]] | None = None,
    select: str | None = None,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    time_limit: float | None = None,
    batch_runs: int = 0,
    allow_code: bool = False,
    set: Mapping[str, Any] | None = None,
    **flags: Unpack[CommonSettings],
) -> ComparisonResult:
    """Compare methods on the same data with the same sampled clients.

    Args:
        methods: The methods, as a list of texts and objects, or as text separated by commas or
            semicolons.
        experiment: An `Experiment`, an experiment file, or nested dictionaries like one.
        seeds: Number of seeds (0, 1, ...), or a list of seeds.
        grid: Values of settings to try, by flag or dotted key: `{"lr": [0.1, 0.05]}`.
        select: Selection of a method's setting in a grid: "validation" shows the one with the
            highest validation accuracy, "all" shows all settings. Default: "validation" for a grid.
        model, data: As in `run`.
        out: The output folder. Default: a temporary folder, see `ComparisonResult.folder`.
        overwrite: Replace an earlier comparison in the output folder.
        quiet, verbose, allow_code: As in `run`.
        time_limit: Seconds after which the runs are saved and `Stopped` is raised.
        batch_runs: Maximum number of runs of a method (seeds and numeric settings) that the engine
            vectorized trains as one batch. 1: each run alone, 0: as many as fit.
        set: Settings to change, by dotted key.
        **flags: Settings to change, as in `run`:

    Returns:
        The finished comparison.
    """
    objects, names = _objects(model, data)
    select = select or ("validation" if grid else "all")
    if select not in ("all", "validation"):
        raise InputError(f"select must be all or validation, not {select!r}")
    changes = {**changes_from_flags({**names, **flags}), **(set or {})}
    folder = _output_folder(out)
    done = start_comparison(
        _plan_points(_tree(experiment, allow_code), changes, methods, seeds, grid or {}),
        folder,
        select=select,
        overwrite=overwrite,
        progress=_progress(folder, quiet, verbose),
        time_limit=TimeLimit(time_limit),
        batch_runs=batch_runs,
        **objects,
    )
    return _warn(ComparisonResult(done.files))


@with_settings(CommonSettings)
def search(
    method: str,
    *,
    around: float,
    key: str = "local.lr",
    experiment: ExperimentInput = None,
    seeds: int | Sequence[int] = 1,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    time_limit: float | None = None,
    batch_runs: int = 0,
    allow_code: bool = False,
    set: Mapping[str, Any] | None = None,
    **flags: Unpack[CommonSettings],
) -> SearchResult:
    """Search the best value of a numeric setting on validation data.

    Nine values are tried: the guess, and half magnitudes (factors of 3.16) up to two magnitudes
    around it; more where the best is at an end; at last quarter magnitudes around the best, which
    has the highest validation accuracy, as a mean over seeds. The test set is not used. The same
    call continues a search that is in the output folder.

    Args:
        method: The method, as text.
        around: The guess, above 0.
        key: The setting, by flag or dotted key, or an option of the method such as `fedprox.mu`.
        experiment: As in `run`.
        seeds: Number of seeds (0, 1, ...), or a list of seeds. One separates no values.
        model, data: As in `run`.
        out: The output folder. Default: a temporary folder, see `SearchResult.folder`.
        overwrite: Replace an earlier search in the output folder.
        quiet, verbose, allow_code: As in `run`.
        time_limit, batch_runs: As in `compare`.
        set: Settings to change, by dotted key.
        **flags: Settings to change, as in `run`:

    Returns:
        The finished search: `best` is the value, `tried` and `table()` say what was tried.

    Raises:
        InputError: A setting is invalid, or the output folder holds another search.
    """
    objects, names = _objects(model, data)
    changes = {**changes_from_flags({**names, **flags}), **(set or {})}
    numbers, folder = _seed_list(seeds, "a search"), _output_folder(out)
    found = search_values(
        SearchSpace(_tree(experiment, allow_code), changes, method, numbers, key, around),
        folder,
        overwrite=overwrite,
        progress=_progress(folder, quiet, verbose),
        time_limit=TimeLimit(time_limit),
        batch_runs=batch_runs,
        **objects,
    )
    return SearchResult(ComparisonResult(found.comparison.files))


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    method: Method | Part | Sequence[Method | Part] | None = None,
    model: nn.Module | None = None,
    data: Any = None,
    quiet: bool = False,
    verbose: bool = False,
    time_limit: float | None = None,
    allow_code: bool = False,
) -> RunResult | ComparisonResult | SearchResult:
    """Continue a run, a comparison or a search that was interrupted.

    Args:
        folder: Its folder.
        rounds: Continue a run until this round in total. Default: the rounds of its experiment.
        method: The method, if it was an object; a list of them for a comparison.
        model: The model, if it was an object.
        data: The dataset, if it was an object.
        quiet: Print no progress.
        verbose: As in `run`.
        time_limit: Seconds after which it is saved and `Stopped` is raised.
        allow_code: Accept a model, method or data that are Python code to import.

    Returns:
        The run, comparison or search, with the same result as without the interruption.
    """
    found = open_trusted(folder, allow_code)
    objects, _ = _objects(model, data)
    given = _methods_by_text(method)
    progress = _progress(found.folder, quiet, verbose)
    limit = TimeLimit(time_limit)
    if isinstance(found, ComparisonResult):
        if rounds is not None:
            raise InputError(
                f"{folder} is a comparison: --rounds can extend single runs only, such as"
                f" those in {found.folder / 'runs'}"
            )
        if SEARCH in found.plan:
            again = resume_search(found.folder, progress=progress, time_limit=limit, **objects)
            return SearchResult(ComparisonResult(again.comparison.files))
        done = resume_comparison(
            found.folder, progress=progress, time_limit=limit, methods=given, **objects
        )
        return _warn(ComparisonResult(done.files, done.resumptions))
    objects["method"] = next(iter(given.values()), None)
    run = resume_run(found.folder, rounds=rounds, progress=progress, time_limit=limit, **objects)
    return _warn(RunResult(run.files, run.resumed))


def dated_folder(label: str) -> Path:
    """A new output folder `runs/DATE-LABEL`; the second one of a day ends in -2, and so on."""
    name = f"{date.today()}-{folder_name(label)}"
    parent = Path("runs")
    taken = SafePath(parent).list_names()
    names = (f"{name}-{i}" if i > 1 else name for i in itertools.count(1))
    return parent / next(name for name in names if name not in taken)


def _plan_points(
    base: Mapping[str, Any],
    changes: Mapping[str, Any],
    methods: str | Method | Part | Sequence[str | Method | Part],
    seeds: int | Sequence[int],
    grid: Mapping[str, Sequence[Any]],
) -> list[GridPoint]:
    """Plan the runs of a comparison; the arguments are those of `compare`."""
    given = [methods] if isinstance(methods, Method | Part) else methods
    if isinstance(given, str):
        texts = [text for part in given.split(";") for text in split_top_level(part)]
        given = [text.strip() for text in texts if text.strip()]
    objects = _methods_by_text(given)
    names = [method if isinstance(method, str) else describe(_method(method)) for method in given]
    numbers = _seed_list(seeds, "a comparison")
    keys = {}
    for name, values in grid.items():
        if not values:
            raise InputError(f"the grid gives no values for {name}: write --grid {name}=0.1,0.05")
        keys[FLAGS.get(name, name)] = list(values)
    return plan_grid(base, changes, names, numbers, keys, objects)


def _method(method: Method | Part) -> Method:
    return Method((method,)) if isinstance(method, Part) else method


def _methods_by_text(methods: Any) -> dict[str, Method]:
    """The methods that are objects, by the text that describes them."""
    several = methods if isinstance(methods, list | tuple) else [methods]
    objects = (_method(m) for m in several if isinstance(m, Method | Part))
    return {describe(method): method for method in objects}


def _seed_list(seeds: int | Sequence[int], user: str) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise InputError(f"{user} needs at least one seed: --seeds 3 uses 0, 1 and 2")
    return numbers


def _warn(done: Done) -> Done:
    """Warn, at the line of the user's call, about runs that learned nothing or diverged."""
    for text in done.warnings:
        name = f"{done.method} " if isinstance(done, RunResult) else ""
        warnings.warn(f"{name}{text} ({done.folder})", LearnedNothing, stacklevel=3)
    return done


def _tree(experiment: ExperimentInput, allow_code: bool) -> Mapping[str, Any]:
    if isinstance(experiment, Experiment):
        return experiment.to_tree()
    if experiment is None or isinstance(experiment, Mapping):
        return experiment or {}
    return read_file(Path(experiment), allow_code)


def _progress(folder: Path, quiet: bool, verbose: bool) -> Progress:
    return LoggedProgress(make_progress(quiet, verbose), SafePath.of(folder))


def _output_folder(out: str | Path | None) -> Path:
    return Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="remanence-"))


def _objects(model: Any, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate objects from names. In the experiment, an object is replaced by a description."""
    objects: dict[str, Any] = {"module": None, "source": None}
    names: dict[str, Any] = {}
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(
            f"model is the class {model.__name__}, not a model: write model={model.__name__}(...)"
        )
    if isinstance(model, nn.Module):
        objects["module"], names["model"] = model, type(model).__name__
    elif model is not None:
        names["model"] = model
    if isinstance(data, str | Path):
        names["data"] = str(data)
    elif data is not None:
        objects["source"] = data if isinstance(data, ArrayDataset) else from_dataset(data)
        names["data"] = objects["source"].name
    return objects, names


__all__ = ["compare", "dated_folder", "resume", "run", "search"]
