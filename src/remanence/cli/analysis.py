"""`remanence report`, `watch`, `diagnose`, `evaluate` and `export`: commands that read runs."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from remanence.cli.options import FORMATS, AllowCode, AsJson, Client, DataDir, Folders
from remanence.core.errors import NOTHING_LEARNED, SkippedCheckpoint
from remanence.results.manifest import LoadedCheckpoint


def report(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Page to write. Default: report.html in the first folder."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            help="Folder in which every figure is written as PDF, SVG and PNG, and every table.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A;B",
            help="Columns of the tables of results in that folder, separated by semicolons, such as"
            ' "test accuracy; worst class". Default: all.',
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML report about runs and comparisons."""
    from remanence.analysis.actions import report as write_report

    headings = [name.strip() for name in columns.split(";")] if columns else None
    print(f"report: {write_report(folders, out, figures=figures, columns=headings)}")
    if figures is not None:
        print(f"figures: {figures}")


def watch(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs and comparisons, or folders of them. They may appear later."
        ),
    ],
    port: Annotated[int, typer.Option("--port", help="Port of the page. 0: any free port.")] = 0,
) -> None:
    """Show a live report in the browser while runs train. It opens a port on the loopback
    network interface; only this machine can connect.
    """
    from remanence.reports.live import watch as serve

    serve(
        folders,
        port,
        announce=lambda address: print(f"watching at {address} (Ctrl-C ends it)", flush=True),
    )


def diagnose(folders: Folders, as_json: AsJson = False) -> None:
    """Explain what was forgotten, where, whether it exceeds the noise between seeds, and which
    methods may help.
    """
    from remanence.analysis.actions import diagnose as examine

    found = examine(folders)
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(diagnosis) for diagnosis in found], indent=2))
    else:
        print(found)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Dataset with the same classes. Default: the test set of the run.",
        ),
    ] = None,
    data_dir: DataDir = None,
    client: Client = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on a test set."""
    from remanence.analysis.actions import evaluate as evaluate_model

    result = evaluate_model(folder, data, data_dir=data_dir, client=client, allow_code=allow_code)
    print(json.dumps({"warnings": result.warnings} | result) if as_json else result)
    _report_skipped(LoadedCheckpoint(result["round"], tuple(result["skipped"])))


def export(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run; for tensorboard and mlflow also of a comparison."),
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the model: safetensors, torchscript or onnx; or of the metrics:"
            " tensorboard or mlflow.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Output folder. Default: export in the folder of the run."),
    ] = None,
    client: Client = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Export the trained model, or the metrics over rounds, for use in other programs."""
    from remanence.analysis.actions import export as write
    from remanence.exports import describe_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedCheckpoint)  # printed below
        files, checkpoint = write(folder, kind, out, client=client, allow_code=allow_code)
    if as_json:
        read = {} if checkpoint is None else describe_checkpoint(checkpoint)
        print(json.dumps({"files": [str(path) for path in files], **read}))
    else:
        print(*files, sep="\n")
    if checkpoint is not None:
        if not as_json:
            print(f"model after round {checkpoint.round}")
        _report_skipped(checkpoint)


def _report_skipped(checkpoint: LoadedCheckpoint) -> None:
    """Say which checkpoints were not used, and exit where nothing that was trained is left."""
    if checkpoint.skipped:
        print(f"remanence: {checkpoint.describe()}", file=sys.stderr)
    if checkpoint.lost_everything:
        raise typer.Exit(NOTHING_LEARNED)
