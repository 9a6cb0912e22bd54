"""`remanence reproduce` and `remanence results`: the papers' tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remanence import config
from remanence.cli.options import AsJson, BatchRuns, DataDir, Quiet, Sets, TimeLimitSeconds
from remanence.cli.summary import exit_unless_learned
from remanence.core.errors import InputError

if TYPE_CHECKING:
    from remanence.recipes.tables import ResultOutcome


ResultName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RESULT]",
        help="Table or figure, such as wsm/table-3.2. Without it, all of them are listed.",
        show_default=False,
    ),
]
Scale = Annotated[
    str,
    typer.Option(
        "--scale",
        help="Scale: smoke (seconds), desk (minutes on two cores), gpu (ten minutes on one"
        " H200) or paper.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ROW", help="Restrict to this row or column. May be repeated."),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", help="Number of seeds. Default: that of the scale.", show_default=False
    ),
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print runs, rounds, time and memory without running.")
]
SubstituteData = Annotated[
    bool,
    typer.Option("--substitute-data", help="Replace missing datasets by the recipe's substitutes."),
]
ContinuedFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Output folder. The same command with the same folder continues."),
]
RunsFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs-from",
        metavar="DIR",
        help="Output folder of another result. Its finished runs with the same settings are"
        " copied, not trained again. May be repeated.",
        show_default=False,
    ),
]


def reproduce(
    name: ResultName = None,
    scale: Scale = "desk",
    only: Only = None,
    seeds: Seeds = None,
    plan: Plan = False,
    substitute_data: SubstituteData = False,
    data_dir: DataDir = None,
    out: ContinuedFolder = None,
    runs_from: RunsFrom = None,
    batch_runs: BatchRuns = 0,
    set_: Sets = None,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of a paper, with the published numbers beside ours."""
    if name is None:
        _print_recipes(as_json)
        return
    options: dict[str, Any] = {
        "scale": scale,
        "only": only or [],
        "seeds": seeds,
        "substitute_data": substitute_data,
        "changes": config.parse_assignments(set_ or []),
        "data_dir": data_dir or "",
    }
    if plan:
        _print_plan(name, options)
        return
    if out is None:
        _check_options(name, options)
        raise InputError(
            f"--out is missing: name a folder for the runs of {name}, or print the --plan first"
        )
    from remanence.core.progress import make_progress
    from remanence.core.safe_path import SafePath
    from remanence.recipes import reproduce as run_recipe
    from remanence.rounds.time_limit import TimeLimit

    done = run_recipe.reproduce(
        name,
        out,
        **options,
        runs_from=runs_from or [],
        batch_runs=batch_runs,
        progress=make_progress(quiet or as_json),
        time_limit=TimeLimit(time_limit),
    )
    if as_json:
        print((SafePath(out) / "outcome.json").read().decode())
    elif not quiet:
        _print_result(done, out)
    from remanence.results.run import Comparison

    exit_unless_learned(Comparison(out).learned)


def results(
    folders: Annotated[list[Path], typer.Argument(help="Output folders of remanence reproduce.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the pages.")] = Path("docs/results"),
) -> None:
    """Write a page for each paper, and one of all papers, from reproduced results."""
    from remanence.recipes.results_pages import write_results

    for page in write_results(folders, out):
        print(page)


def _print_recipes(as_json: bool) -> None:
    from remanence.recipes import list_recipes, load_recipe

    recipes = [load_recipe(name) for name in list_recipes()]
    if as_json:
        found = [{"name": r.name, "title": r.title, "source": r.source} for r in recipes]
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{recipe.name:20s}  {recipe.title}" for recipe in recipes))


def _print_plan(name: str, options: dict[str, Any]) -> None:
    from remanence.recipes.estimate import describe_plan
    from remanence.recipes.reproduce import plan_result

    print(describe_plan(plan_result(name, **options, dry_run=True)))


def _check_options(name: str, options: dict[str, Any]) -> None:
    from remanence.recipes.reproduce import plan_result

    plan_result(name, **options)


def _print_result(done: ResultOutcome, out: Path) -> None:
    from rich.console import Console

    from remanence.core.safe_path import SafePath
    from remanence.metrics.groups import group_runs
    from remanence.recipes.figure_data import PICTURE
    from remanence.recipes.reproduce import PAGE
    from remanence.recipes.tables import as_table, describe_claims, describe_notes
    from remanence.report.phrases import list_warnings
    from remanence.results.run import REPORT, Comparison

    plan, console = done.plan, Console()
    print(
        f"{plan.recipe.name}: {plan.recipe.title}; scale {plan.scale}:"
        f" {plan.scale_settings.description or 'as published'}"
    )
    console.print(as_table(done, console.width))
    for text in list_warnings(group_runs([Comparison(out)])):
        console.print(f"Warning: {text}", markup=False, highlight=False)
    files = (("page", PAGE), ("figure", PICTURE), ("report", REPORT))
    written = [
        f"{kind}: {out / file}" for kind, file in files if (SafePath(out) / file).is_regular_file()
    ]
    print("\n".join([*describe_notes(done), *describe_claims(done), *written]))
