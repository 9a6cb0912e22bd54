"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# The tables that `remanence list` prints. Written here, since the tables themselves import torch.
LISTS = {
    "methods": "with a server and without",
    "losses": "of local training, joined to a method by +",
    "aggregators": "robust ones, joined to a method by +",
    "privacy": "differential privacy, joined to a method by +",
    "attacks": "by hostile clients",
    "models": "networks",
    "data": "datasets",
    "partitions": "of the examples over clients",
    "drifts": "schedules of changes of the data",
    "concepts": "what changes when the data drift",
    "topologies": "which clients can exchange models without a server",
    "availabilities": "which clients are available in which rounds",
    "speeds": "of clients",
    "optimizers": "of the clients",
    "schedules": "of the learning rate",
    "engines": "how the clients of a round are trained",
    "settings": "of an experiment file, with defaults",
}
# of `remanence export`; a test compares them with those of `exports`
FORMATS = ("safetensors", "torchscript", "onnx", "tensorboard", "mlflow")

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs and comparisons.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Output folder. Default: runs/DATE-METHOD.", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change any setting, such as local.batch_size=16. May be repeated.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")
]
SILENT = 2  # times --quiet
Quiet = Annotated[
    int,
    typer.Option(
        "-q",
        "--quiet",
        count=True,
        metavar=" ",
        help="Print the results without progress; twice (-qq), print nothing.",
        show_default=False,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Print a line for every round, with all rejections."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Allow the file or folder of the experiment to name Python code to import and run.",
    ),
]
TimeLimitSeconds = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Save and exit with code 75 after this time; remanence resume continues.",
    ),
]
SeedList = Annotated[
    str, typer.Option("--seeds", help="Number of seeds, or a list such as 0,7,42.")
]
BatchRuns = Annotated[
    int,
    typer.Option(
        "--batch-runs",
        min=0,
        help="Maximum number of runs of one method that are trained as one batch. 1: each run"
        " alone, 0: as many as fit.",
    ),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml]",
        help="Experiment file. Flags and --set change its settings.",
        show_default=False,
    ),
]
DataOrExperiment = Annotated[
    str | None,
    typer.Argument(
        metavar="[DATA|EXPERIMENT.toml]",
        help="Data as after --data, such as cifar10, patients.csv or a folder, or an experiment"
        " file.",
        show_default=False,
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        help="Folder of the datasets. Default: the environment variable REMANENCE_DATA.",
    ),
]
Client = Annotated[
    int | None,
    typer.Option(
        "--client",
        help="Client whose personal model is used. Default: the global model.",
        show_default=False,
    ),
]
