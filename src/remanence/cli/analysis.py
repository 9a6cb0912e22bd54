"""`remanence report`, `watch`, `diagnose`, `evaluate` and `export`: commands that read runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from remanence.cli.options import AllowCode, AsJson, Client, DataDir, Folders
from remanence.core.errors import NOTHING_LEARNED
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
) -> None:
    """Write a self-contained HTML report about runs and comparisons."""
    from remanence.reports import write_report

    if figures is not None:
        from remanence.reports.figure_files import write_figures
        from remanence.results.run import load

        write_figures([load(folder) for folder in folders], figures)
    print(f"report: {write_report(*folders, out=out)}")
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
    from remanence.diagnosis import diagnose as examine
    from remanence.diagnosis import render_text
    from remanence.metrics.groups import group_runs
    from remanence.reports.phrases import list_warnings
    from remanence.results.run import load

    results = [load(folder) for folder in folders]
    found = examine(results)
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(diagnosis) for diagnosis in found], indent=2))
    else:
        for text in list_warnings(group_runs(results)):
            print(f"Warning: {text}")
        print(render_text(found), end="")


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
    from remanence.api import load_trusted
    from remanence.exports import evaluate as evaluate_model
    from remanence.exports import load_test_data

    done = load_trusted(folder, allow_code)
    source = load_test_data(done, data, data_dir)
    result = evaluate_model(done, source, client=client)
    if as_json:
        print(json.dumps({"warnings": done.warnings} | result))
    else:
        for text in done.warnings:
            print(f"Warning: the run {text}")
        print(
            f"{result['evaluated']}: accuracy {_percent(result['accuracy'])}, loss"
            f" {_loss(result['loss'])}, macro F1 {_percent(result['macro_f1'])}"
        )
        for name, value in zip(source.classes, result["per_class"], strict=True):
            print(f"  {name:20s} {_percent(value)}")
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
    from remanence.api import load_trusted
    from remanence.exports import TRACKERS, describe_checkpoint, export_model
    from remanence.exports import export as write

    done = load_trusted(folder, allow_code or kind in TRACKERS)  # metrics need no model
    if kind in TRACKERS:
        files, checkpoint = write(done, out, kind), None
    else:
        files, checkpoint = export_model(done, out, kind, client=client)
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
