"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutFolder = Annotated[Path, typer.Option("--out", help="the folder to write")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="any key of the experiment, such as local.batch_size=16"
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="replace an earlier run in that folder")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="let the experiment's file or folder name Python code to import and run",
    ),
]
TimeLimitSeconds = Annotated[
    float | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="save and exit with 75 after so long; resumable"
    ),
]
BatchRuns = Annotated[
    int,
    typer.Option(
        "--batch-runs",
        min=0,
        help="most runs of one method trained in one stack; 1: each alone, 0: as many as fit",
    ),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml]",
        help="an experiment file; flags and --set change it",
        show_default=False,
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", help="where data sets lie; default: the variable REMANENCE_DATA"),
]
