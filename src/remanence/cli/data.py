"""`remanence data`: sources, what is in them, and who gets what. Thin, like `main.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from remanence import config
from remanence.cli.flags import with_flags
from remanence.cli.options import AsJson, DataDir, ExperimentFile, Quiet, Sets

app = typer.Typer(
    help="Data sources and how they are divided.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command("list")
def data_list(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The data sources."""
    from remanence.cli.listing import print_entries

    print_entries("data", as_json)


@app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help='a source, such as cifar10 or "npz(path=my.npz)"')],
    data_dir: DataDir = None,
) -> None:
    """Read a source from end to end and say what is in it."""
    from remanence.cli.listing import check_data

    print(check_data(name, data_dir or os.environ.get("REMANENCE_DATA", "")))


@app.command("show")
@with_flags(
    without=(
        "method",
        "model",
        "epochs",
        "steps",
        "batch_size",
        "lr",
        "optimizer",
        "schedule",
        "buffers",
        "rounds",
        "min_replies",
        "record_every",
        "record_local",
        "engine",
        "device",
        "precision",
        "deterministic",
        "sample",
    )
)
def data_show(
    experiment: ExperimentFile = None,
    *,
    flags: dict[str, Any],
    set_: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="write the picture as an HTML page")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw who gets what: the share of each class in each client's data."""
    spec = config.parse_experiment(
        config.read_file(experiment) if experiment else {},
        {**flags, **config.parse_assignments(set_ or [])},
    )
    from remanence.cli.listing import show_partition

    show_partition(spec, out, as_json)


@app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="a published data set, such as cifar100 or svhn")],
    data_dir: DataDir = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="also the files that are seldom used, such as SVHN's third"),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a data set from its publisher; a broken line is taken up again where it broke."""
    from remanence.data.fetch import fetch, show_progress

    root = data_dir or os.environ.get("REMANENCE_DATA", "")
    with show_progress(quiet) as tell:
        folder = fetch(name, Path(root) if root else None, everything=everything, tell=tell)
    print(f"{name}: {folder}")
