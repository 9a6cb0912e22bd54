"""The claims of a paper with their verdicts, as Markdown: a row for each claim, a row for each
paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from remanence.recipes.claims import evaluate_claims
from remanence.recipes.loader import load_recipe
from remanence.recipes.outcomes import StoredResult
from remanence.recipes.tables import ResultOutcome, describe_rounds
from remanence.recipes.verdicts import (
    DASH,
    FAILS,
    FAILS_SO_FAR,
    HOLDS,
    HOLDS_SO_FAR,
    MIXED,
    TOO_EARLY,
    UNTESTED,
    ClaimVerdict,
    choose_longest,
)
from remanence.report.tables import escape_markdown as escape

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
HEADINGS = "| result | claim | verdict | ours | published | as claimed | rounds | seeds | scale |"
VERDICTS = """\
The verdicts:

- *holds*, *does not hold*: with at least half of the published rounds, half of the claim's
  comparisons and two seeds
- *holds so far*, *not so far*: with less than that
- *mixed*: the comparisons disagree; the count says how many are as claimed
- *too early to tell*: under a tenth of the published rounds, or too few for this claim
- *not tested*: none of its comparisons was run"""
COLUMNS = """\
*as claimed* counts the comparisons that are as claimed, those that were run, and all. Several
comparisons have a range of numbers. A gap is positive in the claimed direction. *rounds* are those
of our run, of the published ones. The verdict rests on our longest run, with published settings if
such a run is long enough to tell; *scale* names what was changed."""
QUEUE = "queue"  # the remark about the runs that are still to be made
SUMMARY = (HOLDS, HOLDS_SO_FAR, MIXED, FAILS_SO_FAR, FAILS, TOO_EARLY, UNTESTED)


class JudgedClaim(NamedTuple):
    """A claim with the verdict that counts, and the result on which it rests."""

    result: str  # the name of the recipe
    verdict: ClaimVerdict
    scale: str  # empty: not run


def judge_claims(name: str, results: Sequence[StoredResult]) -> list[JudgedClaim]:
    """The verdict on every claim of a recipe, each from one result that tests it: the longest with
    published settings, of those that are not too early to tell.

    Args:
        name: The recipe.
        results: Its stored results.
    """
    recipe = load_recipe(name)
    found = []
    for place, untested in enumerate(evaluate_claims(recipe, {}, {})):
        tests = [result for result in results if result.outcome.verdicts[place].run]
        able = [result for result in tests if result.outcome.verdicts[place].word != TOO_EARLY]
        tests = able or tests
        published = [result for result in tests if not changes_of(result.metadata)]
        tests = published or tests
        if not tests:
            found.append(JudgedClaim(name, untested, ""))
            continue
        verdicts = [result.outcome.verdicts[place] for result in tests]
        chosen = choose_longest(verdicts)
        found.append(JudgedClaim(name, verdicts[chosen], describe_setting(tests[chosen])))
    return found


def changes_of(metadata: Mapping[str, object]) -> dict[str, object]:
    """The changes of the experiment itself that a result was run with."""
    changes = metadata["changes"]
    assert isinstance(changes, dict)
    return {
        key: value
        for key, value in changes.items()
        if key not in EXECUTION_KEYS and not key.startswith("record.")
    }


def describe_setting(result: StoredResult) -> str:
    """Scale, changes of the experiment, and substitutes for data."""
    changes = [f"{key}={json.dumps(value)}" for key, value in changes_of(result.metadata).items()]
    cells = result.outcome.plan.cells.values()
    replaced = sorted({f"substitute for {cell.substitute}" for cell in cells if cell.substitute})
    return ", ".join([result.outcome.plan.scale, *changes, *replaced])


def claims_of(outcome: ResultOutcome) -> list[JudgedClaim]:
    """The claims of one result, judged by this result alone."""
    plan = outcome.plan
    return [JudgedClaim(plan.recipe.name, verdict, plan.scale) for verdict in outcome.verdicts]


def claims_table(claims: Sequence[JudgedClaim]) -> str:
    """A row for each claim."""
    lines = [HEADINGS, "|---|---|---|--:|--:|--:|--:|--:|---|"]
    for name, verdict, scale in claims:
        basis = verdict.basis
        where = f" (section {verdict.section})" if verdict.section else ""
        count = f"{verdict.held} of {len(verdict.run)}, of {len(verdict.checks)}"
        cells = [
            name.partition("/")[2],
            escape(verdict.text) + where,
            f"**{verdict.phrase}**",
            verdict.ours,
            verdict.published,
            count if basis else f"{len(verdict.checks)} not run",
            f"{describe_rounds(basis)} ({basis.share:.0%})" if basis else DASH,
            str(basis.seeds) if basis else DASH,
            escape(scale) or "not run",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def index_page(
    papers: Mapping[str, Sequence[JudgedClaim]], titles: Mapping[str, str], notes: Mapping[str, str]
) -> str:
    """The page with a row for each paper, and the runs that are still to be made.

    Args:
        papers: The claims of every paper.
        titles: The names of the papers.
        notes: What holds, what does not and how sure that is, in words; and the queue of runs.
    """
    lines = [
        "# What holds of the five papers",
        "",
        "Made by `remanence results` from the numbers in `outcomes/`. Every claim is a statement of"
        " the paper; a paper's page has a row for each, with our number, the published one, and"
        " what the verdict rests on.",
        "",
        f"| paper | {' | '.join(SUMMARY)} | in short |",
        f"|---|{'--:|' * len(SUMMARY)}---|",
    ]
    for paper, claims in papers.items():
        words = [claim.verdict.word for claim in claims]
        counts = " | ".join(str(words.count(word)) for word in SUMMARY)
        note = " ".join(notes.get(paper, DASH).split())
        lines.append(f"| [{paper}]({paper}.md): {escape(titles[paper])} | {counts} | {note} |")
    queue = notes.get(QUEUE, "").strip()
    still = ["", "## Runs at published length", "", queue] if queue else []
    return "\n".join([*lines, "", VERDICTS, *still, ""])
