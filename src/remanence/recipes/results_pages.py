"""docs/results: a page a paper, made from the folders that `remanence reproduce` left. Nothing
on it is written by hand, and nothing is invented.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remanence.config import read_toml
from remanence.core.errors import InputError
from remanence.core.files import write_atomically
from remanence.recipes.claims import evaluate_claims
from remanence.recipes.estimate import H200, estimate, readable
from remanence.recipes.figure_data import FIGURE, PICTURE
from remanence.recipes.loader import PAPERS, list_recipes, load_recipe
from remanence.recipes.plan import ResultPlan, make_plan, source_of
from remanence.recipes.recipe import NEVER, PublishedNumber, Recipe
from remanence.recipes.tables import (
    ResultOutcome,
    as_markdown,
    describe_claims,
    describe_disagreements,
)
from remanence.report.figure_files import require_matplotlib
from remanence.report.tables import escape_markdown as escape
from remanence.report.tables import readable_seconds

OUTCOME, OUTCOMES, REMARKS = "outcome.json", "outcomes", "remarks.toml"
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
}  # changes that leave the experiment what it is


def write_results(folders: Sequence[str | Path], out: str | Path) -> list[Path]:
    """One page for every paper, with the results in these folders, and what those that were not run
    would take. -> the pages

    The numbers are kept beside the pages, in outcomes/, from which they can be made again: that
    folder's own may be given, too. What people have to say about a result stands in remarks.toml
    there, by name of the result.
    """
    target = Path(out)
    found = [read_outcome(Path(folder)) for folder in folders]
    names = [name_outcome(about) for _, about in found]
    data = {
        name: (Path(folder) / FIGURE).read_text()
        for name, folder in zip(names, folders, strict=True)
        if (Path(folder) / FIGURE).exists()
    }
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InputError(
                f"{folders[names.index(name)]} and {folders[place]} hold the same result"
                " with the same settings: give one of them;"
                " for more rows in one table call remanence reproduce with all of them and"
                " the same --out"
            )
    remarks = read_remarks(target / REMARKS)
    drawn = _draw_figures(
        {name: outcome.plan.recipe for name, (outcome, _) in zip(names, found, strict=True)}, data
    )
    target.mkdir(parents=True, exist_ok=True)
    pages = []
    for name, (_, about) in zip(names, found, strict=True):
        kept = target / OUTCOMES / name
        kept.mkdir(parents=True, exist_ok=True)
        write_atomically(kept / OUTCOME, json.dumps(about, indent=1, allow_nan=False).encode())
        if name in drawn:
            write_atomically(kept / FIGURE, data[name].encode())
            write_atomically(kept / PICTURE, drawn[name])
    for paper in PAPERS:
        path = target / f"{paper}.md"
        mine = [
            (outcome, about, f"{OUTCOMES}/{name}/{PICTURE}" if name in drawn else "")
            for name, (outcome, about) in zip(names, found, strict=True)
            if outcome.plan.recipe.name.startswith(f"{paper}/")
        ]
        write_atomically(path, _page(paper, mine, remarks).encode())
        pages.append(path)
    return pages


def _draw_figures(recipes: Mapping[str, Recipe], data: Mapping[str, str]) -> dict[str, bytes]:
    """The pictures of those results that are figures, by name of the outcome."""
    if not data:
        return {}
    from remanence.recipes.figure_plots import draw_figure

    require_matplotlib()
    pictures = {
        name: draw_figure(recipes[name].figure_kind, text, recipes[name].title)
        for name, text in data.items()
    }
    return {name: picture for name, picture in pictures.items() if picture is not None}


def name_outcome(about: Mapping[str, Any]) -> str:
    """Result, scale, and a few letters for the settings: the same result may be there at
    several lengths, and more rows of one take the place of fewer.
    """
    changes = sorted((key, value) for key, value in about["changes"].items() if key != "data.dir")
    settings = json.dumps([about["seeds"], about["substitute_data"], changes])
    return f"{about['result'].replace('/', '-')}-{about['scale']}-{hashlib.sha256(settings.encode()).hexdigest()[:6]}"


def read_remarks(path: Path) -> dict[str, str]:
    """What is said about results besides their numbers; nothing where there is no such file."""
    remarks = read_toml(path, "a file of remarks", "") if path.exists() else {}
    strange = [
        name
        for name, text in remarks.items()
        if name not in list_recipes() or not isinstance(text, str)
    ]
    if strange:
        raise InputError(
            f"{path} speaks of {strange[0]!r}, which is no result: write a name such as"
            " wsm/table-3.2 and a text"
        )
    return remarks


def read_outcome(folder: Path) -> tuple[ResultOutcome, dict[str, Any]]:
    """What a folder's numbers were, as they were written down: the runs themselves need not be
    there any more.
    """
    try:
        about: dict[str, Any] = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder} has no {OUTCOME}: give folders that remanence reproduce has finished"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{folder / OUTCOME} is damaged ({error}): run the same remanence reproduce"
            " again, which skips what is done"
        ) from None
    recipe = load_recipe(about["result"])
    options = {
        "seeds": about["seeds"],
        "only": about["only"],
        "changes": about["changes"],
        "substitute_data": about["substitute_data"],
    }
    plan = make_plan(recipe, about["scale"], absent=about["absent"], **options)
    ours = {
        (row, column): PublishedNumber(math.inf if text == NEVER else value, deviation, text)
        for row, column, value, deviation, text in about["numbers"]
    }
    notes = {(row, column): note for row, column, note in about["notes"]}
    return ResultOutcome(plan, ours, notes, tuple(evaluate_claims(recipe, ours))), about


def describe_result(outcome: ResultOutcome, about: Mapping[str, Any], picture: str = "") -> str:
    """One result as Markdown: where it is from, how it was run, the picture, the table, the
    claims, the disagreements, the readings.
    """
    plan, recipe = outcome.plan, outcome.plan.recipe
    rounds = sorted({run.spec.total_rounds for run in plan.runs})
    told = _count(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
    done = about.get("runs", len(plan.runs))
    amount = (
        f"{_count(len(plan.runs), 'run')} of"
        f" {told}{f', {done} of them done' if done < len(plan.runs) else ''},"
        f" {_count(len(plan.seeds), 'seed')}"
    )
    shape = f": {plan.scale_settings.about}" if plan.scale_settings.about else ", as published"
    changed = ", ".join(f"{key}={value}" for key, value in about["changes"].items())
    shape += f" (changed: {changed})" if changed else ""
    time = readable_seconds(about["seconds"])
    lines = [
        f"## {recipe.name}: {escape(recipe.title)}",
        "",
        f"{escape(recipe.paper)}, {escape(recipe.source)}.  ",
        f"`{command_of(about)}`  ",
        f"Scale {plan.scale}{escape(shape)}. {amount};"
        f" {escape(about['machine']) or 'no machine yet'}, {time} of training.",
        "",
        *([f"![{escape(recipe.title)}]({picture})", ""] if picture else []),
        as_markdown(outcome),
        "### Do the claims hold?",
        "",
        *(f"- {escape(line)}" for line in describe_claims(outcome)),
        "",
    ]
    wrong = describe_disagreements(outcome)
    if wrong and plan.scale != "smoke":
        lines += ["What came out otherwise:", "", *(f"- {escape(line)}" for line in wrong), ""]
    lines += [
        "What we read into silences:",
        "",
        *(f"- {escape(line)}" for line in recipe.interpretation),
        "",
    ]
    return "\n".join(lines)


def command_of(about: Mapping[str, Any]) -> str:
    """The command that made a result."""
    words = [f"remanence reproduce {about['result']} --scale {about['scale']}"]
    words += [f'--only "{label}"' for label in about["only"]]
    words += [f"--seeds {about['seeds']}"] if about["seeds"] is not None else []
    words += [
        f"--set {key}={json.dumps(value)}"
        for key, value in about["changes"].items()
        if key != "data.dir"
    ]
    words += ["--substitute-data"] if about["substitute_data"] else []
    return " ".join([*words, "--out DIR"])


def _page(
    paper: str,
    results: Sequence[tuple[ResultOutcome, Mapping[str, Any], str]],
    remarks: Mapping[str, str],
) -> str:
    names = [name for name in list_recipes() if name.startswith(f"{paper}/")]
    longest_first = sorted(results, key=lambda result: -_longest(result[0]))
    done = {
        name: [result for result in longest_first if result[0].plan.recipe.name == name]
        for name in names
    }
    first = load_recipe(names[0])
    lines = [
        f"# {escape(first.paper)}",
        "",
        "Made by `remanence results`; every number of ours comes from a run folder.",
        "",
    ]
    lines += [
        "| result | scale | claim | | comparisons as claimed, run, in all |",
        "|---|---|---|---|---|",
    ]
    for name, mine in done.items():
        lines += _list_claims(name, [(outcome, about["changes"]) for outcome, about, _ in mine])
    lines.append("")
    for name, mine in done.items():
        said = remarks.get(name, "").strip() if mine else ""
        lines += [
            *(describe_result(*result) for result in mine),
            *(["### Remarks", "", said, ""] if said else []),
        ]
    lines += _list_costs({name: [outcome for outcome, _, _ in mine] for name, mine in done.items()})
    return "\n".join(lines)


def _list_costs(done: Mapping[str, Sequence[ResultOutcome]]) -> list[str]:
    """A line for every result: what was run of it, and what the rest would take."""
    lines = [
        "## What was run, and what the rest would take",
        "",
        f"Times are those of `--plan`, on {H200.name}: estimates from the arithmetic of"
        " the networks, good to a factor of three.",
        "",
        "| result | run | `--scale gpu` | `--scale paper`, as published | data |",
        "|---|---|---|---|---|",
    ]
    for name, outcomes in done.items():
        recipe = load_recipe(name)
        run = "; ".join(
            dict.fromkeys(
                f"{outcome.plan.scale}, {_count(_longest(outcome), 'round')}"
                for outcome in outcomes
            )
        )
        plans = [make_plan(recipe, scale) for scale in ("gpu", "paper")]
        costs = (_describe_cost(plan) for plan in plans)
        sources = dict.fromkeys(source_of(run.spec) for run in plans[1].runs)
        lines.append(
            f"| {name}: {escape(recipe.title)} | {run or 'not run'} | {' | '.join(costs)} |"
            f" {escape(', '.join(sources))} |"
        )
    return [*lines, ""]


def _describe_cost(plan: ResultPlan) -> str:
    rounds = {run.spec.total_rounds for run in plan.runs}
    length = f"{'' if len(rounds) == 1 else 'up to '}{_count(max(rounds), 'round')}"
    return (
        f"{_count(len(plan.runs), 'run')} of {length},"
        f" {readable(estimate(run.spec for run in plan.runs).gpu)}"
    )


def _list_claims(
    name: str, results: Sequence[tuple[ResultOutcome, Mapping[str, Any]]]
) -> list[str]:
    """A line of the table for every claim and every setting in which it was tested; one for
    those that were not tested at all.
    """
    lines = []
    for place, untested in enumerate(evaluate_claims(load_recipe(name), {})):
        tested = [
            (
                ", ".join(
                    [
                        outcome.plan.scale,
                        _count(_longest(outcome), "round"),
                        *_describe_changes(changes),
                    ]
                ),
                outcome.verdicts[place],
            )
            for outcome, changes in results
            # smoke tests the machinery, never a claim
            if outcome.plan.scale != "smoke" and outcome.verdicts[place].tested
        ]
        for scale, verdict in tested or [("not run", untested)]:
            count = f"{verdict.held}, {verdict.tested}, {len(verdict.questions)}"
            lines.append(
                f"| {name} | {escape(scale)} | {escape(verdict.says)} | {verdict.word} | {count} |"
            )
    return lines


def _describe_changes(changes: Mapping[str, Any]) -> list[str]:
    """Changes to the experiment itself, not to its length or to how it is computed and recorded."""
    return [
        f"{key}={json.dumps(value)}"
        for key, value in changes.items()
        if key not in EXECUTION_KEYS and not key.startswith("record.")
    ]


def _longest(outcome: ResultOutcome) -> int:
    """Rounds of the longest run."""
    return max(run.spec.total_rounds for run in outcome.plan.runs)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
