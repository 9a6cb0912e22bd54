"""The Python API: `rem.run(...)`, `rem.compare(...)`, `rem.search(...)`, `rem.resume(...)`."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from remanence.config import (
    FLAGS,
    changes_from_flags,
    forbid_code,
    parse_experiment,
    read_file,
)
from remanence.core.compose import describe
from remanence.core.errors import InputError, LearnedNothing
from remanence.core.expressions import split_top_level
from remanence.core.files import folder_name
from remanence.core.progress import make_progress
from remanence.core.safe_path import SafePath
from remanence.core.slots import Method, Part
from remanence.data import from_dataset
from remanence.data.dataset import ArrayDataset
from remanence.results.run import SEARCH, Comparison, Run, load
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps.grid import GridPoint, plan_grid, resume_comparison, start_comparison
from remanence.sweeps.search import SearchSpace, resume_search, search_values
from remanence.sweeps.search_result import SearchResult

Done = TypeVar("Done", Run, Comparison)


def run(
    experiment: str | Path | Mapping[str, Any] | None = None,
    *,
    method: str | Method | Part | None = None,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    time_limit: float | None = None,
    set: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Run:
    """Run one experiment.

    Args:
        experiment: An experiment file, or nested dictionaries like one. Default: the default
            settings.
        method: The method, as text or as an object such as `fedprox(mu=0.1) + wsm()`.
        model: The model, as text or as an `nn.Module`.
        data: The data, as text or a path, or an object that `rem.from_dataset` reads: a torch
            dataset, a pair of arrays (x, y), a data frame, or one of these for each site by name.
        out: The output folder. Default: a temporary folder, see `Run.folder`.
        overwrite: Replace an earlier run in the output folder.
        quiet: Print no progress.
        time_limit: Seconds after which the run saves itself and raises `Stopped`.
        set: Settings to change, by dotted key: `{"local.batch_size": 16}`.
        **flags: Settings to change, by the short names in `config.FLAGS`: `rounds=20`, `lr=0.1`.

    Returns:
        The finished run. Where it learned nothing or diverged, a `LearnedNothing` warning says
        why, and so do `Run.learned` and `Run.warnings`.

    Raises:
        InputError: A setting or a combination of settings is invalid.
    """
    objects, names = _objects(method, model, data)
    changes = {**changes_from_flags(names | flags), **(set or {})}
    return _warn(
        start_run(
            parse_experiment(_tree(experiment), changes),
            _output_folder(out),
            overwrite=overwrite,
            progress=make_progress(quiet),
            time_limit=TimeLimit(time_limit),
            **objects,
        )
    )


def compare(
    methods: str | Method | Part | Sequence[str | Method | Part],
    *,
    experiment: str | Path | Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] = 1,
    grid: Mapping[str, Sequence[Any]] | None = None,
    select: str | None = None,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    time_limit: float | None = None,
    batch_runs: int = 0,
    set: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Comparison:
    """Compare methods on the same data with the same sampled clients.

    Args:
        methods: The methods, as a list of texts and objects, or as text separated by commas or
            semicolons.
        experiment: An experiment file, or nested dictionaries like one.
        seeds: Number of seeds (0, 1, ...), or a list of seeds.
        grid: Values of settings to try, by flag or dotted key: `{"lr": [0.1, 0.05]}`.
        select: Selection of a method's setting in a grid: "validation" shows the one with the
            highest validation accuracy, "all" shows all settings. Default: "validation" for a grid.
        model: The model, as in `run`.
        data: The dataset, as in `run`.
        out: The output folder. Default: a temporary folder, see `Comparison.folder`.
        overwrite: Replace an earlier comparison in the output folder.
        quiet: Print no progress.
        time_limit: Seconds after which the runs are saved and `Stopped` is raised.
        batch_runs: Maximum number of runs of a method (seeds and numeric settings) that the engine
            vectorized trains as one batch. 1: each run alone, 0: as many as fit.
        set: Settings to change, by dotted key.
        **flags: Settings to change, by short name.

    Returns:
        The finished comparison.
    """
    objects, names = _objects(None, model, data)
    select = select or ("validation" if grid else "all")
    if select not in ("all", "validation"):
        raise InputError(f"select must be all or validation, not {select!r}")
    changes = {**changes_from_flags(names | flags), **(set or {})}
    done = start_comparison(
        _plan_points(_tree(experiment), changes, methods, seeds, grid or {}),
        _output_folder(out),
        select=select,
        overwrite=overwrite,
        progress=make_progress(quiet),
        time_limit=TimeLimit(time_limit),
        batch_runs=batch_runs,
        module=objects["module"],
        source=objects["source"],
    )
    return _warn(done)


def search(
    method: str,
    *,
    around: float,
    key: str = "local.lr",
    experiment: str | Path | Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] = 1,
    model: str | nn.Module | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    time_limit: float | None = None,
    batch_runs: int = 0,
    set: Mapping[str, Any] | None = None,
    **flags: Any,
) -> SearchResult:
    """Search the best value of a numeric setting on validation data.

    Nine values are tried: the guess, and half magnitudes (factors of 3.16) up to two magnitudes
    around it; more of them where the best is the largest or the smallest; at last quarter
    magnitudes around the best. The best value has the highest validation accuracy, as a mean over
    seeds. The test set is not used. The same call continues a search that is in the output folder.

    Args:
        method: The method, as text.
        around: The guess, above 0.
        key: The setting, by flag or dotted key, or an option of the method such as `fedprox.mu`.
        experiment: An experiment file, or nested dictionaries like one.
        seeds: Number of seeds (0, 1, ...), or a list of seeds. One separates no values.
        model: The model, as in `run`.
        data: The dataset, as in `run`.
        out: The output folder. Default: a temporary folder, see `SearchResult.folder`.
        overwrite: Replace an earlier search in the output folder.
        quiet: Print no progress.
        time_limit: Seconds after which the runs are saved and `Stopped` is raised.
        batch_runs: As in `compare`.
        set: Settings to change, by dotted key.
        **flags: Settings to change, by short name.

    Returns:
        The finished search: `best` is the value, `tried` and `table()` say what was tried.

    Raises:
        InputError: A setting is invalid, or the output folder holds another search.
    """
    objects, names = _objects(None, model, data)
    objects.pop("method")
    changes = {**changes_from_flags(names | flags), **(set or {})}
    numbers = _seed_list(seeds, "a search")
    return search_values(
        SearchSpace(_tree(experiment), changes, method, numbers, key, around),
        _output_folder(out),
        overwrite=overwrite,
        progress=make_progress(quiet),
        time_limit=TimeLimit(time_limit),
        batch_runs=batch_runs,
        **objects,
    )


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    method: Method | Part | Sequence[Method | Part] | None = None,
    model: nn.Module | None = None,
    data: Any = None,
    quiet: bool = False,
    time_limit: float | None = None,
    allow_code: bool = True,
) -> Run | Comparison | SearchResult:
    """Continue a run, a comparison or a search that was interrupted.

    Args:
        folder: Its folder.
        rounds: Continue a run until this round in total. Default: the rounds of its experiment.
        method: The method, if it was an object; a list of them for a comparison.
        model: The model, if it was an object.
        data: The dataset, if it was an object.
        quiet: Print no progress.
        time_limit: Seconds after which it is saved and `Stopped` is raised.
        allow_code: Accept a model, method or data that are Python code to import.

    Returns:
        The run, comparison or search, with the same result as without the interruption.
    """
    found = load_trusted(folder, allow_code)
    objects, _ = _objects(method, model, data)
    progress, limit = make_progress(quiet), TimeLimit(time_limit)
    if isinstance(found, Comparison):
        if rounds is not None:
            raise InputError(
                f"{folder} is a comparison: --rounds can extend single runs only, such as"
                f" those in {found.folder / 'runs'}"
            )
        objects.pop("method")
        objects_by_text = _methods_by_text(method)
        if SEARCH in found.plan:
            return resume_search(found.folder, progress=progress, time_limit=limit, **objects)
        return _warn(
            resume_comparison(
                found.folder,
                methods=objects_by_text,
                progress=progress,
                time_limit=limit,
                **objects,
            )
        )
    return _warn(
        resume_run(found.folder, rounds=rounds, progress=progress, time_limit=limit, **objects)
    )


def dated_folder(label: str) -> Path:
    """A new output folder `runs/DATE-LABEL`; the second one of a day ends in -2, and so on."""
    name = f"{date.today()}-{folder_name(label)}"
    parent = Path("runs")
    taken = SafePath(parent).list_names()
    names = (f"{name}-{i}" if i > 1 else name for i in itertools.count(1))
    return parent / next(name for name in names if name not in taken)


def load_trusted(folder: str | Path, allow_code: bool) -> Run | Comparison:
    """Load a run or a comparison whose model or data will be built.

    Args:
        folder: The folder of the run or comparison.
        allow_code: Accept settings that name Python code to import, `package.module:name`. A
            folder from another person must not decide which code runs.
    """
    found = load(folder)
    if not allow_code:
        forbid_code(found.settings, found.folder)
    return found


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
        name = f"{done.method} " if isinstance(done, Run) else ""
        warnings.warn(f"{name}{text} ({done.folder})", LearnedNothing, stacklevel=3)
    return done


def _tree(experiment: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if experiment is None or isinstance(experiment, Mapping):
        return experiment or {}
    return read_file(Path(experiment))


def _output_folder(out: str | Path | None) -> Path:
    return Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="remanence-"))


def _objects(method: Any, model: Any, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate objects from names. In the experiment, an object is replaced by a description."""
    objects: dict[str, Any] = {"method": None, "module": None, "source": None}
    names: dict[str, Any] = {}
    if isinstance(method, Method | Part):
        objects["method"] = _method(method)
        names["method"] = describe(objects["method"])
    elif method is not None:
        names["method"] = method
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


__all__ = ["compare", "dated_folder", "load_trusted", "resume", "run", "search"]
