"""The command line: thin. It reads arguments, calls the house, prints; torch is imported only
by commands that need it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from remanence import config
from remanence.cli.data import app as data_app
from remanence.cli.flags import with_flags
from remanence.cli.flower import app as flower_app
from remanence.cli.options import (
    AllowCode,
    AsJson,
    BatchRuns,
    ExperimentFile,
    OutFolder,
    Overwrite,
    Quiet,
    Sets,
    TimeLimitSeconds,
)
from remanence.cli.recipes import reproduce, results
from remanence.cli.summary import print_summary
from remanence.core import expressions
from remanence.core.errors import INTERRUPTED, InputError, RemanenceError
from remanence.version import __version__

app = typer.Typer(
    help="Learning over many clients whose data differ and drift: what the models forget, and"
    " how to keep it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")

ClientOption = Annotated[
    int | None,
    typer.Option(
        "--client", help="whose model, where clients have models of their own", show_default=False
    ),
]
BenchJobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB]...",
        help="A, B, B2, C, C-mixed, D, E, F, G, H, H-scaffold; default: all that fit",
        show_default=False,
    ),
]


@app.command()
@with_flags()
def run(
    experiment: ExperimentFile = None,
    *,
    out: OutFolder,
    flags: dict[str, Any],
    set_: Sets = None,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run one experiment, from a file or by flags, and write its report."""
    base = config.read_file(experiment, allow_code) if experiment else {}
    spec = config.parse_experiment(base, {**flags, **config.parse_assignments(set_ or [])})
    from remanence.core.progress import make_progress
    from remanence.rounds.loop import TimeLimit, start_run

    done = start_run(
        spec,
        out,
        overwrite=overwrite,
        progress=make_progress(quiet or as_json),
        deadline=TimeLimit(time_limit),
    )
    print_summary(done.folder, quiet, as_json)


@app.command()
@with_flags(without=("method", "seed"))
def compare(
    experiment: ExperimentFile = None,
    *,
    methods: Annotated[
        str, typer.Option("--methods", help='separated by semicolons: "fedavg; fedavg+wsm"')
    ],
    out: OutFolder,
    flags: dict[str, Any],
    seeds: Annotated[str, typer.Option("--seeds", help="how many, or a list such as 0,7,42")] = "1",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B", help="values to try, such as lr=0.1,0.05"),
    ] = None,
    select: Annotated[
        str,
        typer.Option(
            "--select", help="which setting of a grid counts: last (show all) or validation"
        ),
    ] = "last",
    batch_runs: BatchRuns = 0,
    set_: Sets = None,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data and the same draws of clients."""
    changes = {**flags, **config.parse_assignments(set_ or [])}
    base = config.read_file(experiment, allow_code) if experiment else {}
    if select not in ("last", "validation"):
        raise InputError(f"--select must be last or validation, not {select!r}")
    values = dict(_split_grid(text) for text in grid or [])
    from remanence.api import make_cells
    from remanence.core.progress import make_progress
    from remanence.rounds.loop import TimeLimit
    from remanence.sweeps.grid import start_comparison

    cells = make_cells(base, changes, methods, _read_seeds(seeds), values)
    settings: dict[str, Any] = {"select": select, "overwrite": overwrite, "batch_runs": batch_runs}
    done = start_comparison(
        cells,
        out,
        progress=make_progress(quiet or as_json),
        deadline=TimeLimit(time_limit),
        **settings,
    )
    print_summary(done.folder, quiet, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="a run or a comparison")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="go on to so many rounds in all")
    ] = None,
    time_limit: TimeLimitSeconds = None,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run or a comparison that was interrupted; the result is the same as without
    the interruption.
    """
    from remanence import api

    done = api.resume(
        folder, rounds=rounds, quiet=quiet or as_json, time_limit=time_limit, allow_code=allow_code
    )
    print_summary(done.folder, quiet, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="runs and comparisons")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="the page to write; default: report.html in the first folder"),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            help="also write every picture as PDF, SVG and PNG, and the tables, into this folder",
        ),
    ] = None,
) -> None:
    """Write a self-contained page about one run or a comparison of many."""
    from remanence.report import write_report

    if figures is not None:
        from remanence.report.figure_files import write_figures
        from remanence.results.run import load

        write_figures([load(folder) for folder in folders], figures)
    print(f"report: {write_report(*folders, out=out)}")
    if figures is not None:
        print(f"figures: {figures}")


@app.command()
def watch(
    folders: Annotated[
        list[Path],
        typer.Argument(help="runs, comparisons, or folders of them; they may appear later"),
    ],
    port: Annotated[int, typer.Option("--port", help="0 takes any that is free")] = 0,
) -> None:
    """Show the report in a browser while runs go on; only this machine can see it."""
    from remanence.report.live import watch as serve

    serve(
        folders,
        port,
        announce=lambda address: print(f"watching at {address} (Ctrl-C ends it)", flush=True),
    )


@app.command()
def diagnose(
    folders: Annotated[list[Path], typer.Argument(help="runs and comparisons")],
    as_json: AsJson = False,
) -> None:
    """Say in plain words what was forgotten, where, whether it is more than noise, and which
    cures fit.
    """
    from remanence.diagnosis import diagnose as examine
    from remanence.diagnosis import render_text
    from remanence.results.run import load

    found = examine([load(folder) for folder in folders])
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(diagnosis) for diagnosis in found], indent=2))
    else:
        print(render_text(found), end="")


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="a run")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="another source with the same classes; default: the run's own test set"
        ),
    ] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="where data sets lie")] = None,
    client: ClientOption = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on a test set."""
    from remanence.experiment.data_setup import load_data
    from remanence.export import evaluate as score

    done = _one_run(folder)
    if not allow_code:
        config.forbid_import_path(done.config.model, folder)
    changes = {
        name: value for name, value in (("name", data), ("dir", data_dir)) if value is not None
    }
    source = load_data(
        done.config.model_copy(update={"data": done.config.data.model_copy(update=changes)})
    )
    result = score(done, source, client=client)
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{result['evaluated']}: accuracy {_percent(result['accuracy'])}, loss"
        f" {_loss(result['loss'])}, macro F1 {_percent(result['macro_f1'])}"
    )
    for name, value in zip(source.classes, result["per_class"], strict=True):
        print(f"  {name:20s} {_percent(value)}")


@app.command()
def export(
    folder: Annotated[
        Path, typer.Argument(help="a run; for tensorboard and mlflow also a comparison")
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="the model as safetensors, torchscript or onnx; its numbers for tensorboard or"
            " mlflow",
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="the folder to write; default: export in the run's folder"),
    ] = None,
    client: ClientOption = None,
    allow_code: AllowCode = False,
) -> None:
    """Write the trained model, or its numbers over rounds, for use elsewhere."""
    if kind in ("tensorboard", "mlflow"):
        from remanence.report.trackers import export_scalars
        from remanence.results.run import load

        for path in export_scalars([load(folder)], out or folder / "export" / kind, kind):
            print(path)
        return
    from remanence.export import export as write

    done = _one_run(folder)
    if not allow_code:
        config.forbid_import_path(done.config.model, folder)
    for path in write(done, out or done.folder / "export", kind, client=client):
        print(path)


@app.command()
def bench(
    jobs: BenchJobs = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto")] = "auto",
    precision: Annotated[str, typer.Option("--precision", help="fp32, tf32 or bf16")] = "fp32",
    repeat: Annotated[
        int, typer.Option("--repeat", help="how often each is measured; the median counts")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure our speed beside a plain PyTorch loop and the floor of the hardware, on data made
    on the spot.
    """
    from remanence.bench import render, run_jobs

    results = run_jobs(
        jobs or [],
        device=device,
        precision=precision,
        repeat=repeat,
        say=lambda line: print(line, file=sys.stderr),
    )
    print(json.dumps(results, indent=2) if as_json else render(results))


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="methods, objectives, models, data, partitions, drifts, concepts, topologies,"
            " availabilities, optimizers, schedules or engines"
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """What there is to choose from, with options and their defaults."""
    from remanence.cli.listing import print_entries

    print_entries(what, as_json)


# after the commands of every day, which is where --help shows them
for _command in (reproduce, results):
    app.command()(_command)


def _one_run(folder: Path) -> Any:
    from remanence.results.run import Comparison, load

    found = load(folder)
    if isinstance(found, Comparison):
        raise InputError(
            f"{folder} is a comparison: give one of its runs, such as"
            f" {found.runs[0].folder if found.runs else folder / 'runs'}"
        )
    return found


def _split_grid(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise InputError(f"--grid {text!r} has no values: write --grid lr=0.1,0.05")
    return name.strip(), [
        config.parse_value(value.strip())
        for value in expressions.split_top_level(values)
        if value.strip()
    ]


def _read_seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--seeds {text!r} is neither a number of seeds nor a list such as 0,7,42"
        ) from None
    return numbers if "," in text else numbers[0]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"remanence {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: a user's mistake is a sentence and exit code 2, never a traceback."""
    import click

    try:
        # typer answers Ctrl-C and typer.Exit with a code instead of raising
        code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:
            print("remanence: stopped", file=sys.stderr)
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr)
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("remanence: stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
