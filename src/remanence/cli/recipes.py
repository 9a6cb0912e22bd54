"""`remanence reproduce` and `remanence results`: the papers' tables and figures. Thin, like
`main.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from remanence import config
from remanence.cli.options import AsJson, BatchRuns, DataDir, Quiet, Sets, TimeLimitSeconds
from remanence.core.errors import InputError


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RESULT]",
            help="such as wsm/table-3.2; without it, all are listed",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            "--scale",
            help="smoke (seconds), desk (minutes on two cores), gpu (ten minutes on one H200) or"
            " paper",
        ),
    ] = "desk",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROW", help="only this row or column; may be repeated"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="how many; default: as the scale has it", show_default=False),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="print runs, rounds, time and memory without running")
    ] = False,
    substitute_data: Annotated[
        bool,
        typer.Option(
            "--substitute-data", help="use the recipe's stand-in for data that are not there"
        ),
    ] = False,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="the folder to write; the same command goes on in it"),
    ] = None,
    batch_runs: BatchRuns = 0,
    set_: Sets = None,
    time_limit: TimeLimitSeconds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of one of the papers, with the published numbers beside ours."""
    from remanence.recipes import list_recipes, load_recipe

    if name is None:
        found = [
            {"name": each, "title": load_recipe(each).title, "source": load_recipe(each).source}
            for each in list_recipes()
        ]
        print(
            json.dumps(found, indent=2)
            if as_json
            else "\n".join(f"{entry['name']:20s}  {entry['title']}" for entry in found)
        )
        return
    from remanence.recipes.reproduce import plan_result
    from remanence.recipes.reproduce import reproduce as run_result

    options: dict[str, Any] = {
        "scale": scale,
        "only": only or [],
        "seeds": seeds,
        "substitute_data": substitute_data,
        "changes": config.parse_assignments(set_ or []),
        "data_dir": data_dir or "",
    }
    if plan:
        from remanence.recipes.estimate import describe_plan

        print(describe_plan(plan_result(name, **options, dry_run=True)))
        return
    if out is None:
        # what is wrong with what was asked for is said before what is missing
        plan_result(name, **options)
        raise InputError(
            f"--out is missing: name a folder for the runs of {name}, or look at --plan first"
        )
    from remanence.core.progress import make_progress
    from remanence.rounds.loop import TimeLimit

    shown = make_progress(quiet or as_json)
    done = run_result(
        name, out, **options, batch_runs=batch_runs, progress=shown, deadline=TimeLimit(time_limit)
    )
    if as_json:
        print((out / "outcome.json").read_text())
    elif not quiet:
        from rich.console import Console

        from remanence.recipes.figure_data import PICTURE
        from remanence.recipes.reproduce import PAGE
        from remanence.recipes.tables import as_table, describe_claims, describe_notes
        from remanence.results.run import REPORT

        console = Console()
        print(
            f"{name}: {done.plan.recipe.title}; scale {scale}:"
            f" {done.plan.scale_settings.about or 'as published'}"
        )
        console.print(as_table(done, console.width))
        made = [
            f"{kind}: {out / file}"
            for kind, file in (("page", PAGE), ("figure", PICTURE), ("report", REPORT))
            if (out / file).exists()
        ]
        print("\n".join([*describe_notes(done), *describe_claims(done), *made]))


def results(
    folders: Annotated[list[Path], typer.Argument(help="folders of remanence reproduce")],
    out: Annotated[Path, typer.Option("--out", help="the folder for the pages")] = Path(
        "docs/results"
    ),
) -> None:
    """Write a page for every paper from the folders of reproduced results."""
    from remanence.recipes.results_pages import write_results

    for page in write_results(folders, out):
        print(page)
