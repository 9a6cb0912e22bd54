"""docs/results: one page for each paper, made from folders that `remanence reproduce` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError
from remanence.core.files import make_folder, write_atomically
from remanence.core.safe_path import SafePath
from remanence.recipes.claim_tables import (
    COLUMNS,
    QUEUE,
    VERDICTS,
    JudgedClaim,
    claims_of,
    claims_table,
    index_page,
    judge_claims,
)
from remanence.recipes.estimate import H200, estimate, readable
from remanence.recipes.figure_data import FIGURE, PICTURE
from remanence.recipes.loader import PAPERS, list_recipes, load_recipe
from remanence.recipes.outcomes import OUTCOME, StoredResult, command_of, name_outcome, read_outcome
from remanence.recipes.plan import ResultPlan, make_plan, source_of
from remanence.recipes.tables import (
    ResultOutcome,
    as_markdown,
    describe_counts,
    describe_disagreements,
)
from remanence.report.figure_files import require_matplotlib
from remanence.report.table_columns import readable_seconds
from remanence.report.tables import escape_markdown as escape
from remanence.results.readers import read_bytes, read_toml

OUTCOMES, REMARKS = "outcomes", "remarks.toml"


def write_results(folders: Sequence[str | Path], out: str | Path) -> list[Path]:
    """Write one page for each paper, with its results and the estimated cost of the others, and
    README.md with a row for each paper and the runs that are still to be made.

    The numbers are stored beside the pages, in `outcomes/`; the pages can be made again from these
    folders. `remarks.toml` in the output folder has remarks on results and papers, by name, and
    under `queue` the runs that are still to be made.

    Args:
        folders: Folders of `remanence reproduce`, or folders in `outcomes/`.
        out: The folder of the pages.

    Returns:
        The pages, README.md last.
    """
    target = SafePath(Path(out))
    results = _read_results([Path(folder) for folder in folders])
    remarks = read_remarks(target / REMARKS)
    results = _draw_figures(results)
    make_folder(target)
    for result in results:
        _store(result, target / OUTCOMES / result.name)
    texts, claims = {}, {}
    for paper in PAPERS:
        by_recipe = _by_recipe(paper, results)
        claims[paper] = [
            claim for name, own in by_recipe.items() for claim in judge_claims(name, own)
        ]
        texts[f"{paper}.md"] = _page(by_recipe, claims[paper], remarks)
    titles = {name.partition("/")[0]: load_recipe(name).paper for name in list_recipes()}
    texts["README.md"] = index_page(claims, titles, remarks)
    for file, text in texts.items():
        write_atomically(target / file, text.encode())
    return [(target / file).path for file in texts]


def _by_recipe(paper: str, results: Sequence[StoredResult]) -> dict[str, list[StoredResult]]:
    """The results of every recipe of a paper, the longest first."""
    longest_first = sorted(results, key=lambda result: -_longest(result.outcome))
    return {
        name: [result for result in longest_first if result.outcome.plan.recipe.name == name]
        for name in list_recipes()
        if name.startswith(f"{paper}/")
    }


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
    claims = [verdict.to_json() for verdict in result.outcome.verdicts]
    text = json.dumps({**result.metadata, "claims": claims}, indent=1, allow_nan=False)
    write_atomically(folder / OUTCOME, text.encode())
    if result.picture is not None:
        write_atomically(folder / FIGURE, result.figure_data.encode())
        write_atomically(folder / PICTURE, result.picture)


def read_remarks(path: Path | SafePath) -> dict[str, str]:
    """Read the remarks on results, papers and the queue, by name; there may be no such file."""
    file = SafePath.of_file(path)
    remarks = read_toml(file) if file.is_regular_file() else {}
    wrong = [
        name
        for name, text in remarks.items()
        if name not in (QUEUE, *PAPERS, *list_recipes()) or not isinstance(text, str)
    ]
    if wrong:
        raise InputError(
            f"{path} has a remark on {wrong[0]!r}, which is no result and no paper: write a name"
            f" such as wsm/table-3.2, or {QUEUE}, and a text"
        )
    return remarks


def describe_result(outcome: ResultOutcome, metadata: Mapping[str, Any]) -> str:
    """Describe one result as Markdown: the verdicts on its claims by this result alone, and its
    details.

    Args:
        outcome: The result.
        metadata: The content of its outcome.json.
    """
    interpretation = outcome.plan.recipe.interpretation
    return "\n".join(
        [
            f"# {outcome.plan.recipe.name}: {escape(outcome.plan.recipe.title)}",
            "",
            claims_table(claims_of(outcome)),
            VERDICTS,
            "",
            COLUMNS,
            "",
            _details(outcome, metadata),
            *_list("How we interpret what the paper leaves open:", interpretation),
        ]
    )


def _details(
    outcome: ResultOutcome, metadata: Mapping[str, Any], figure: Sequence[str] = ()
) -> str:
    """Source, command, figure, table and disagreements."""
    plan, recipe = outcome.plan, outcome.plan.recipe
    lines = [
        f"## {recipe.name}: {escape(recipe.title)}",
        "",
        f"{escape(recipe.paper)}, {escape(recipe.source)}.  ",
        f"`{command_of(metadata)}`  ",
        _describe_scale(plan, metadata),
        "",
        *figure,
        as_markdown(outcome),
        *_list("Comparisons that are not as claimed:", describe_disagreements(outcome)),
    ]
    return "\n".join(lines)


def _list(heading: str, lines: Sequence[str]) -> list[str]:
    """A list with its heading; nothing for no lines."""
    return [heading, "", *(f"- {escape(line)}" for line in lines), ""] if lines else []


def _show_figure(result: StoredResult) -> list[str]:
    if result.picture is None:
        return []
    title = escape(result.outcome.plan.recipe.title)
    return [f"![{title}]({OUTCOMES}/{result.name}/{PICTURE})", ""]


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


def _page(
    by_recipe: Mapping[str, Sequence[StoredResult]],
    claims: Sequence[JudgedClaim],
    remarks: Mapping[str, str],
) -> str:
    name = next(iter(by_recipe))
    remark = remarks.get(name.partition("/")[0], "").strip()
    interpretations = [load_recipe(other).interpretation for other in by_recipe]
    shared = [line for line in interpretations[0] if all(line in own for own in interpretations)]
    lines = [
        f"# {escape(load_recipe(name).paper)}",
        "",
        *([remark, ""] if remark else []),
        claims_table(claims),
        VERDICTS,
        "",
        COLUMNS,
        "",
        "Every number of ours comes from a run folder. This page is made by `remanence results`.",
        "",
        *_list("How we interpret what the paper leaves open, in all results:", shared),
    ]
    for name, own in by_recipe.items():
        for result in own:
            lines.append(_details(result.outcome, result.metadata, _show_figure(result)))
            if len(own) > 1:  # the table of claims has the longest run only
                lines += _list("The claims in these runs:", describe_counts(result.outcome))
        if not own:
            continue
        remark = remarks.get(name, "").strip()
        of_this = [line for line in load_recipe(name).interpretation if line not in shared]
        lines += _list("How we interpret what the paper leaves open here:", of_this)
        lines += ["### Remarks", "", remark, ""] if remark else []
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


def _longest(outcome: ResultOutcome) -> int:
    """The rounds of the longest run."""
    return max(run.experiment.total_rounds for run in outcome.plan.runs)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
