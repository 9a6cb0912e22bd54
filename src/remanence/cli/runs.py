"""`remanence run`, `compare`, `search` and `resume`: commands that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from remanence import config
from remanence.cli.flags import read_settings, with_flags
from remanence.cli.options import (
    AllowCode,
    AsJson,
    BatchRuns,
    ExperimentFile,
    OutFolder,
    Overwrite,
    Quiet,
    SeedList,
    Sets,
    TimeLimitSeconds,
    Verbose,
)
from remanence.cli.summary import print_search, print_summary
from remanence.core import expressions
from remanence.core.errors import InputError

# Forgetting at its most visible: most clients have a few of the ten classes.
DEMO = {
    "data": {"name": "digits", "partition": "dirichlet(alpha=0.1)"},
    "clients": {"count": 20, "sample": 5},
    "local": {"epochs": 2, "batch_size": 16, "lr": 0.1},
    "record": {"local": True},
}


@with_flags()
def run(
    experiment: ExperimentFile = None,
    *,
    out: OutFolder = None,
    flags: dict[str, Any],
    set_: Sets = None,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = 0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Run one experiment, from a file or by flags, and write its report."""
    base, changes = read_settings(experiment, flags, set_, allow_code)
    settings = config.parse_experiment(base, changes)  # finds mistakes before torch is imported
    from remanence import api

    done = api.run(
        base,
        set=changes,
        out=out or api.dated_folder(settings.method),
        overwrite=overwrite,
        quiet=bool(quiet) or as_json,
        verbose=verbose,
        time_limit=time_limit,
    )
    print_summary(done, quiet, as_json)


@with_flags(without=("method", "seed"))
def compare(
    experiment: ExperimentFile = None,
    *,
    methods: Annotated[
        list[str],
        typer.Option(
            "--methods",
            help='Methods, separated by commas or semicolons, such as "fedavg, fedavg+wsm". May be'
            " repeated.",
        ),
    ],
    out: OutFolder = None,
    flags: dict[str, Any],
    seeds: SeedList = "1",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=A,B",
            help="Values of a setting to try, such as lr=0.1,0.05. May be repeated.",
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            "--select",
            help="Selection of a method's setting in a grid: validation (the highest validation"
            " accuracy) or all (no selection). Default: validation.",
            show_default=False,
        ),
    ] = None,
    batch_runs: BatchRuns = 0,
    set_: Sets = None,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = 0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data with the same sampled clients."""
    base, changes = read_settings(experiment, flags, set_, allow_code)
    values = dict(_parse_grid(text) for text in grid or [])
    from remanence import api

    done = api.compare(
        ";".join(methods),
        experiment=base,
        set=changes,
        seeds=_parse_seeds(seeds),
        grid=values,
        select=select,
        out=out or api.dated_folder("comparison"),
        overwrite=overwrite,
        batch_runs=batch_runs,
        quiet=bool(quiet) or as_json,
        verbose=verbose,
        time_limit=time_limit,
    )
    print_summary(done, quiet, as_json)


@with_flags()
def search(
    experiment: ExperimentFile = None,
    *,
    around: Annotated[
        float, typer.Option("--around", help="Guess of the best value, such as 0.1.")
    ],
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Setting to search, or an option of the method such as fedprox.mu.",
        ),
    ] = "local.lr",
    out: OutFolder = None,
    flags: dict[str, Any],
    seeds: SeedList = "1",
    batch_runs: BatchRuns = 0,
    set_: Sets = None,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = 0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Search the best learning rate of a method, or another number, on validation data. The same
    command with the same --out continues a search that was stopped.
    """
    base, changes = read_settings(experiment, flags, set_, allow_code)
    method = config.parse_experiment(base, changes).method
    changes.pop("method", None)
    from remanence import api

    done = api.search(
        method,
        around=int(around) if around.is_integer() else around,
        key=key,
        experiment=base,
        set=changes,
        seeds=_parse_seeds(seeds),
        out=out or api.dated_folder(f"search {method}"),
        overwrite=overwrite,
        batch_runs=batch_runs,
        quiet=bool(quiet) or as_json,
        verbose=verbose,
        time_limit=time_limit,
    )
    print_search(done, quiet, as_json)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("demo"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds to train.")] = 30,
    quiet: Quiet = 0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Compare four methods on digits under strong label skew, in about a minute. Nothing is
    downloaded; an earlier demo in the folder is replaced.
    """
    from remanence import api

    done = api.compare(
        "fedavg; fedprox(mu=0.1); fedavg+tce; fedavg+wsm",
        experiment=DEMO,
        rounds=rounds,
        seeds=3,
        out=out,
        overwrite=True,
        quiet=bool(quiet) or as_json,
        verbose=verbose,
    )
    print_summary(done, quiet, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a comparison or a search.")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Continue until this round in total.")
    ] = None,
    time_limit: TimeLimitSeconds = None,
    allow_code: AllowCode = False,
    quiet: Quiet = 0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run, comparison or search. The result is the same as without the
    interruption.
    """
    from remanence import api
    from remanence.sweeps.search_result import SearchResult

    done = api.resume(
        folder,
        rounds=rounds,
        quiet=bool(quiet) or as_json,
        verbose=verbose,
        time_limit=time_limit,
        allow_code=allow_code,
    )
    if isinstance(done, SearchResult):
        print_search(done, quiet, as_json)
    else:
        print_summary(done, quiet, as_json)


def _parse_grid(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise InputError(f"--grid {text!r} has no values: write --grid lr=0.1,0.05")
    return name.strip(), [
        config.parse_value(value.strip())
        for value in expressions.split_top_level(values)
        if value.strip()
    ]


def _parse_seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--seeds {text!r} is neither a number of seeds nor a list such as 0,7,42"
        ) from None
    return numbers if "," in text else numbers[0]
