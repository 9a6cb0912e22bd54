"""docs/results: one page for each paper, made from folders that `remanence reproduce` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remanence.core.errors import InputError
from remanence.core.files import make_folder, write_atomically
from remanence.core.safe_path import SafePath
from remanence.recipes.claims import evaluate_claims
from remanence.recipes.estimate import H200, estimate, readable
from remanence.recipes.figure_data import FIGURE, PICTURE
from remanence.recipes.loader import PAPERS, list_recipes, load_recipe
from remanence.recipes.outcomes import OUTCOME, command_of, name_outcome, read_outcome
from remanence.recipes.plan import ResultPlan, make_plan, source_of
from remanence.recipes.tables import (
    ResultOutcome,
    as_markdown,
    describe_claims,
    describe_disagreements,
)
from remanence.reports.figure_files import require_matplotlib
from remanence.reports.table_columns import readable_seconds
from remanence.reports.tables import escape_markdown as escape
from remanence.results.readers import read_bytes, read_toml

OUTCOMES, REMARKS = "outcomes", "remarks.toml"
# Changes of these settings do not change the experiment itself.
EXECUTION_KEYS = {
    "rounds",
    "engine",
    "stack_size",
    "execution",
    "workers",
    "threads",
    "device",
    "precision",
    "data.dir",
}


class StoredResult(NamedTuple):
    """A result that is shown on a page."""

    name: str  # of its folder in outcomes/
    outcome: ResultOutcome
    metadata: Mapping[str, Any]  # the content of outcome.json
    figure_data: str = ""  # the content of figure.csv
    picture: bytes | None = None  # the figure as PNG


def write_results(folders: Sequence[str | Path], out: str | Path) -> list[Path]:
    """Write one page for each paper, with its results and the estimated cost of the others.

    The numbers are stored beside the pages, in `outcomes/`; the pages can be made again from these
    folders. `remarks.toml` in the output folder has remarks on results, by name of the result.

    Args:
        folders: Folders of `remanence reproduce`, or folders in `outcomes/`.
        out: The folder of the pages.

    Returns:
        The pages.
    """
    target = SafePath(Path(out))
    results = _read_results([Path(folder) for folder in folders])
    remarks = read_remarks(target / REMARKS)
    results = _draw_figures(results)
    make_folder(target)
    for result in results:
        _store(result, target / OUTCOMES / result.name)
    pages = []
    for paper in PAPERS:
        page = target / f"{paper}.md"
        own = [r for r in results if r.outcome.plan.recipe.name.startswith(f"{paper}/")]
        write_atomically(page, _page(paper, own, remarks).encode())
        pages.append(page.path)
    return pages


def _read_results(folders: Sequence[Path]) -> list[StoredResult]:
    found: dict[str, StoredResult] = {}
    origin: dict[str, Path] = {}
    for folder in folders:
        outcome, metadata = read_outcome(folder)
        name = name_outcome(metadata)
        if name in found:
            raise InputError(
                f"{origin[name]} and {folder} hold the same result with the same settings: give"
                " one of them; for more rows in one table call remanence reproduce with all of"
                " them and the same --out"
            )
        data = (read_bytes(SafePath(folder) / FIGURE) or b"").decode(errors="replace")
        found[name], origin[name] = StoredResult(name, outcome, metadata, data), folder
    return list(found.values())


def _draw_figures(results: Sequence[StoredResult]) -> list[StoredResult]:
    """The results, with a picture where they are figures."""
    if not any(result.figure_data for result in results):
        return list(results)
    from remanence.recipes.figure_plots import draw_figure

    require_matplotlib()
    drawn = []
    for result in results:
        recipe = result.outcome.plan.recipe
        if result.figure_data:
            picture = draw_figure(recipe.figure_kind, result.figure_data, recipe.title)
            result = result._replace(picture=picture)
        drawn.append(result)
    return drawn


def _store(result: StoredResult, folder: SafePath) -> None:
    folder.make_folder()
    text = json.dumps(result.metadata, indent=1, allow_nan=False)
    write_atomically(folder / OUTCOME, text.encode())
    if result.picture is not None:
        write_atomically(folder / FIGURE, result.figure_data.encode())
        write_atomically(folder / PICTURE, result.picture)


def read_remarks(path: Path | SafePath) -> dict[str, str]:
    """Read the remarks on results, by name of the result; there may be no such file."""
    file = SafePath.of_file(path)
    remarks = read_toml(file) if file.is_regular_file() else {}
    wrong = [
        name
        for name, text in remarks.items()
        if name not in list_recipes() or not isinstance(text, str)
    ]
    if wrong:
        raise InputError(
            f"{path} has a remark on {wrong[0]!r}, which is no result: write a name such as"
            " wsm/table-3.2 and a text"
        )
    return remarks


def describe_result(outcome: ResultOutcome, metadata: Mapping[str, Any], picture: str = "") -> str:
    """Describe one result as Markdown: source, command, figure, table, claims and interpretation.

    Args:
        outcome: The result.
        metadata: The content of its outcome.json.
        picture: The path of its figure.
    """
    plan, recipe = outcome.plan, outcome.plan.recipe
    lines = [
        f"## {recipe.name}: {escape(recipe.title)}",
        "",
        f"{escape(recipe.paper)}, {escape(recipe.source)}.  ",
        f"`{command_of(metadata)}`  ",
        _describe_scale(plan, metadata),
        "",
        *([f"![{escape(recipe.title)}]({picture})", ""] if picture else []),
        as_markdown(outcome),
        "### Do the claims hold?",
        "",
        *(f"- {escape(line)}" for line in describe_claims(outcome)),
        "",
    ]
    differences = describe_disagreements(outcome)
    if differences and plan.scale != "smoke":
        lines += ["Comparisons that differ from the claims:", ""]
        lines += [*(f"- {escape(line)}" for line in differences), ""]
    lines += ["How we interpret what the paper leaves open:", ""]
    lines += [*(f"- {escape(line)}" for line in recipe.interpretation), ""]
    return "\n".join(lines)


def _describe_scale(plan: ResultPlan, metadata: Mapping[str, Any]) -> str:
    """One line: scale, number of runs and rounds, machine and time."""
    rounds = sorted({run.experiment.total_rounds for run in plan.runs})
    length = (
        _count(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
    )
    done = metadata.get("runs", len(plan.runs))
    finished = f", {done} of them finished" if done < len(plan.runs) else ""
    amount = (
        f"{_count(len(plan.runs), 'run')} of {length}{finished}, {_count(len(plan.seeds), 'seed')}"
    )
    description = plan.scale_settings.description
    shape = f": {description}" if description else ", as published"
    changed = ", ".join(f"{key}={value}" for key, value in metadata["changes"].items())
    shape += f" (changed: {changed})" if changed else ""
    return (
        f"Scale {plan.scale}{escape(shape)}. {amount};"
        f" {escape(metadata['machine']) or 'no machine yet'},"
        f" {readable_seconds(metadata['seconds'])} of training."
    )


def _page(paper: str, results: Sequence[StoredResult], remarks: Mapping[str, str]) -> str:
    longest_first = sorted(results, key=lambda result: -_longest(result.outcome))
    by_recipe = {
        name: [r for r in longest_first if r.outcome.plan.recipe.name == name]
        for name in list_recipes()
        if name.startswith(f"{paper}/")
    }
    lines = [
        f"# {escape(load_recipe(next(iter(by_recipe))).paper)}",
        "",
        "Made by `remanence results`; every number of ours comes from a run folder.",
        "",
        "| result | scale | claim | | comparisons as claimed, run, in all |",
        "|---|---|---|---|---|",
    ]
    for name, own in by_recipe.items():
        lines += _list_claims(name, own)
    lines.append("")
    for name, own in by_recipe.items():
        for result in own:
            picture = "" if result.picture is None else f"{OUTCOMES}/{result.name}/{PICTURE}"
            lines.append(describe_result(result.outcome, result.metadata, picture))
        remark = remarks.get(name, "").strip()
        lines += ["### Remarks", "", remark, ""] if own and remark else []
    lines += _list_costs(by_recipe)
    return "\n".join(lines)


def _list_costs(by_recipe: Mapping[str, Sequence[StoredResult]]) -> list[str]:
    """A table with a row for each recipe: what was run, and the estimated cost of the rest."""
    lines = [
        "## What was run, and what the rest would take",
        "",
        f"Times are those of `--plan`, on {H200.name}: estimates from the arithmetic of"
        " the networks, good to a factor of three.",
        "",
        "| result | run | `--scale gpu` | `--scale paper`, as published | data |",
        "|---|---|---|---|---|",
    ]
    for name, results in by_recipe.items():
        recipe = load_recipe(name)
        outcomes = [result.outcome for result in results]
        run = "; ".join(
            dict.fromkeys(f"{o.plan.scale}, {_count(_longest(o), 'round')}" for o in outcomes)
        )
        plans = [make_plan(recipe, scale) for scale in ("gpu", "paper")]
        costs = (_describe_cost(plan) for plan in plans)
        sources = dict.fromkeys(source_of(run.experiment) for run in plans[1].runs)
        lines.append(
            f"| {name}: {escape(recipe.title)} | {run or 'not run'} | {' | '.join(costs)} |"
            f" {escape(', '.join(sources))} |"
        )
    return [*lines, ""]


def _describe_cost(plan: ResultPlan) -> str:
    rounds = {run.experiment.total_rounds for run in plan.runs}
    length = f"{'' if len(rounds) == 1 else 'up to '}{_count(max(rounds), 'round')}"
    return (
        f"{_count(len(plan.runs), 'run')} of {length},"
        f" {readable(estimate(run.experiment for run in plan.runs).gpu)}"
    )


def _list_claims(name: str, results: Sequence[StoredResult]) -> list[str]:
    """A row for every claim and every setting in which it was tested, or one if it was not."""
    lines = []
    for place, untested in enumerate(evaluate_claims(load_recipe(name), {})):
        tested = [
            (_describe_setting(outcome, metadata), outcome.verdicts[place])
            for _, outcome, metadata, *_ in results
            # scale smoke only shows that a recipe runs
            if outcome.plan.scale != "smoke" and outcome.verdicts[place].tested
        ]
        for setting, verdict in tested or [("not run", untested)]:
            count = f"{verdict.held}, {verdict.tested}, {len(verdict.checks)}"
            lines.append(
                f"| {name} | {escape(setting)} | {escape(verdict.text)} | {verdict.word} |"
                f" {count} |"
            )
    return lines


def _describe_setting(outcome: ResultOutcome, metadata: Mapping[str, Any]) -> str:
    """Scale, rounds, and changes of the experiment itself."""
    changes = [
        f"{key}={json.dumps(value)}"
        for key, value in metadata["changes"].items()
        if key not in EXECUTION_KEYS and not key.startswith("record.")
    ]
    return ", ".join([outcome.plan.scale, _count(_longest(outcome), "round"), *changes])


def _longest(outcome: ResultOutcome) -> int:
    """The rounds of the longest run."""
    return max(run.experiment.total_rounds for run in outcome.plan.runs)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
