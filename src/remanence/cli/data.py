"""`remanence data`: datasets, their contents, and their partition over clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from remanence import config
from remanence.cli.flags import read_data_settings, with_flags
from remanence.cli.options import AllowCode, AsJson, DataDir, DataOrExperiment, Sets

app = typer.Typer(
    help="Datasets and their partition over clients.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

# Flags that have no influence on which client has which examples.
NOT_ABOUT_DATA = (
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


@app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the datasets."""
    from remanence.cli.listing import print_entries

    print_entries("data", as_json)


@app.command("check")
def data_check(
    what: DataOrExperiment = None,
    data: Annotated[str | None, typer.Option("--data", help="The same as the argument.")] = None,
    data_dir: DataDir = None,
    allow_code: AllowCode = False,
) -> None:
    """Read a dataset completely and describe its contents."""
    flags = config.changes_from_flags({"data": data, "data_dir": data_dir})
    base, changes = read_data_settings(what, flags, None, allow_code)
    checked = config.parse_experiment(base, changes)
    from remanence.data import describe_dataset
    from remanence.experiment.data_setup import load_data

    print(describe_dataset(load_data(checked)))


@app.command("show")
@with_flags(without=NOT_ABOUT_DATA)
def data_show(
    what: DataOrExperiment = None,
    *,
    flags: dict[str, Any],
    set_: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML page to write with the whole partition.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Show the partition: the fraction of each class in each client's data."""
    base, changes = read_data_settings(what, flags, set_, allow_code)
    checked = config.parse_experiment(base, changes)
    from remanence.cli.listing import show_partition

    show_partition(checked, out, as_json)


@app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="Published dataset, such as cifar100 or svhn.")],
    data_dir: DataDir = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also download optional files, such as the extra set of SVHN."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Download a dataset from its publisher, over the network. An interrupted download continues
    where it stopped.
    """
    from remanence.data.fetch import fetch, show_progress

    root = data_dir or os.environ.get("REMANENCE_DATA", "")
    with show_progress(quiet) as report:
        folder = fetch(name, Path(root) if root else None, everything=everything, report=report)
    print(f"{name}: {folder}")
