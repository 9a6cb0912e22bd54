"""The command `remanence`: its app, small commands, and the entry point with exit codes."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from remanence.cli.analysis import diagnose, evaluate, export, report, watch
from remanence.cli.data import app as data_app
from remanence.cli.flower import app as flower_app
from remanence.cli.options import LISTS, AsJson
from remanence.cli.recipes import reproduce, results
from remanence.cli.runs import compare, demo, resume, run, search
from remanence.core.errors import INTERRUPTED, LearnedNothing, RemanenceError
from remanence.version import __version__

# typer has a copy of click of its own since 0.26: the class must be the one that it raises
UsageError: Any = typer.BadParameter.__base__
EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 a setting, file or argument cannot be used; 65 done, but a"
    " run learned nothing, or only its untrained model can be read; 75 --time-limit reached, all"
    " saved; 130 Ctrl-C and 143 SIGTERM, all saved."
)

app = typer.Typer(
    help="Federated and decentralized learning on data that differ and drift: measure what the"
    " models forget, and prevent it.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=not UsageError.__module__.startswith("click."),  # click itself suggests, too
    rich_markup_mode="rich",
)


def bench(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB]...",
            help="Jobs: A, B, B2, C, C-mixed, D, E, F, G, H, H-scaffold. Default: all that fit on"
            " the device.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Device: cpu, cuda or auto.")] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="Numeric precision: fp32, tf32 or bf16.")
    ] = "fp32",
    repeat: Annotated[
        int, typer.Option("--repeat", help="Number of measurements; the median is printed.")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of the engines beside a plain PyTorch loop and a lower bound on the time
    of a round, on synthetic data.
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


def list_(
    table: Annotated[
        str | None,
        typer.Argument(
            help=f"Table: {', '.join(LISTS)}. Default: the list of tables.",
            show_default=False,
            autocompletion=lambda: list(LISTS),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the available methods, losses, models and so on, with options and defaults."""
    if table is None:
        lines = (f"remanence list {name:15s}{text}" for name, text in LISTS.items())
        print(json.dumps(LISTS, indent=2) if as_json else "\n".join(lines))
        return
    from remanence.cli.listing import print_entries

    print_entries(table, as_json)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"remanence {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# in the order of --help
for _command in (
    demo,
    run,
    compare,
    search,
    resume,
    report,
    watch,
    diagnose,
    evaluate,
    export,
    bench,
):
    app.command()(_command)
app.command("list")(list_)
for _command in (reproduce, results):
    app.command()(_command)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


def main() -> None:
    """Entry point. A mistake of the user is one sentence and exit code 2, never a traceback."""
    try:
        with warnings.catch_warnings():
            # commands print these themselves
            warnings.simplefilter("ignore", LearnedNothing)
            # typer turns Ctrl-C and typer.Exit into a return value instead of raising
            code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:
            print("remanence: stopped", file=sys.stderr)
    except RemanenceError as error:
        print(f"remanence: {error}", file=sys.stderr)
        code = error.exit_code
    except typer.Exit as error:
        code = error.exit_code
    except UsageError as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("remanence: stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the process that reads our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
