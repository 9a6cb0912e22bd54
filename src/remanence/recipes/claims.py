"""Whether the claims of a paper hold in our numbers.

A claim becomes comparisons. Each of them holds, holds in part (the order but not the size), does
not hold, or is not tested. The forms of a claim in TOML, each with its `text`:

- `{ better = [...], worse = [...], at = [...], by = 0.0 }`: the cells of one row (or column) are
  better than those of another, by at least `by`; with `by` below zero they are not worse by more.
- `{ best = "ROW", among = [...], at = [...] }`: no other row is better.
- `{ better, worse, wider = "COLUMN", narrower = "COLUMN" }`: the gap between two rows is larger in
  one column than in another, or than in each of several.
- `{ cells = [["ROW", "COLUMN"], ...], above = x }` or `below = x`: these cells are above (below) x.

With `most = true` the claim is about most of its comparisons: more than half is enough. `better`
follows the measure: fewer rounds and less forgetting are better. `at` names rows or columns of the
other axis; without it, all of them are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remanence.recipes.recipe import CellNumber, Recipe, RecipeError, TableLine

HOLDS, IN_PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "not tested"
_KEYS = {
    "text",
    "better",
    "worse",
    "best",
    "among",
    "at",
    "by",
    "wider",
    "narrower",
    "cells",
    "above",
    "below",
    "most",
}

Numbers = Mapping[tuple[str, str], CellNumber]


@dataclass(frozen=True)
class ClaimCheck:
    """One comparison: the gap in the claimed direction. Positive is as claimed."""

    what: str  # what is compared, in words
    ours: float | None  # None: not run
    published: float | None
    by: float = 0.0

    @property
    def outcome(self) -> str:
        if self.ours is None or self.ours != self.ours:
            return UNTESTED
        if self.ours > 0 if self.by == 0 else self.ours >= self.by:  # a tie does not count
            return HOLDS
        return IN_PART if self.ours > 0 else FAILS


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim with its comparisons."""

    text: str
    checks: tuple[ClaimCheck, ...]
    most: bool = False  # the paper claims it of most comparisons only

    @property
    def word(self) -> str:
        if self.most and 2 * self.held > self.tested:
            return HOLDS
        return combine_outcomes([check.outcome for check in self.checks])

    @property
    def tested(self) -> int:
        return sum(check.outcome != UNTESTED for check in self.checks)

    @property
    def held(self) -> int:
        return sum(check.outcome == HOLDS for check in self.checks)


def combine_outcomes(outcomes: Sequence[str]) -> str:
    """Combine outcomes; those that were not tested do not count.

    >>> combine_outcomes(["holds", "not tested"]), combine_outcomes(["holds", "does not hold"])
    ('holds', 'holds in part')
    >>> combine_outcomes(["does not hold"]), combine_outcomes([])
    ('does not hold', 'not tested')
    """
    seen = {outcome for outcome in outcomes if outcome != UNTESTED}
    if not seen:
        return UNTESTED
    return seen.pop() if len(seen) == 1 else IN_PART


def evaluate_claims(recipe: Recipe, ours: Numbers) -> list[ClaimVerdict]:
    """Evaluate every claim of a recipe on our numbers."""
    return [
        ClaimVerdict(
            str(claim["text"]), tuple(_compare(recipe, claim, ours)), bool(claim.get("most"))
        )
        for claim in recipe.claims
    ]


def check_claims(recipe: Recipe) -> None:
    """Raise `RecipeError` for a claim with unknown labels or entries, or without comparisons."""
    for claim in recipe.claims:
        if "text" not in claim or set(claim) - _KEYS:
            raise RecipeError(
                f"recipe {recipe.name}: a claim has a text and has no entry"
                f" {sorted(set(claim) - _KEYS)}: {claim}"
            )
        if not list(_compare(recipe, claim, {})):
            raise RecipeError(f"recipe {recipe.name}: the claim {claim['text']!r} compares nothing")


def _compare(recipe: Recipe, claim: Mapping[str, Any], ours: Numbers) -> Iterator[ClaimCheck]:
    by = float(claim.get("by", 0.0))
    if "cells" in claim:
        yield from _compare_to_threshold(recipe, claim, ours)
    elif "wider" in claim:
        for (better, worse), narrower in itertools.product(
            _pairs(recipe, claim), _list(claim["narrower"])
        ):
            pairs = [
                _cells(recipe, better, worse, _line(recipe, label))
                for label in (claim["wider"], narrower)
            ]
            gap, published = (
                [_gap(recipe, cells, numbers) for cells in pairs]
                for numbers in (ours, recipe.published)
            )
            what = f"{better.label} over {worse.label}, more at {claim['wider']} than at {narrower}"
            yield ClaimCheck(what, _minus(*gap), _minus(*published), by)
    else:
        for better, worse in _pairs(recipe, claim):
            for other in _others(recipe, better, claim):
                cells = _cells(recipe, better, worse, other)
                what = f"{better.label} against {worse.label}, {other.label}"
                yield ClaimCheck(
                    what, _gap(recipe, cells, ours), _gap(recipe, cells, recipe.published), by
                )


def _pairs(recipe: Recipe, claim: Mapping[str, Any]) -> list[tuple[TableLine, TableLine]]:
    if "best" in claim:
        best = _line(recipe, claim["best"])
        others = [_line(recipe, label) for label in claim.get("among", [])] or list(
            _axis(recipe, best)
        )
        return [(best, other) for other in others if other is not best and not other.sources]
    better, worse = (
        [_line(recipe, label) for label in _list(claim[side])] for side in ("better", "worse")
    )
    if len(better) == len(worse):
        return list(zip(better, worse, strict=True))
    if 1 not in (len(better), len(worse)):
        raise RecipeError(
            f"recipe {recipe.name}: {claim['text']!r} compares {len(better)} with {len(worse)}"
        )
    return list(itertools.product(better, worse))


def _others(recipe: Recipe, line: TableLine, claim: Mapping[str, Any]) -> Sequence[TableLine]:
    """The lines of the other axis at which a pair is compared."""
    return [_line(recipe, label) for label in _list(claim.get("at", []))] or (
        recipe.columns if line in recipe.rows else recipe.rows
    )


def _cells(
    recipe: Recipe, better: TableLine, worse: TableLine, other: TableLine
) -> list[tuple[TableLine, TableLine]]:
    return [(line, other) if better in recipe.rows else (other, line) for line in (better, worse)]


def _gap(
    recipe: Recipe, cells: Sequence[tuple[TableLine, TableLine]], numbers: Numbers
) -> float | None:
    """By how much the first cell is better: 0 if neither reached the target, infinite if only one
    of them did.
    """
    first, second = (
        numbers.get((row.label, column.label), CellNumber()).value for row, column in cells
    )
    if first is None or second is None:
        return None
    if first == second:
        return 0.0
    sign = -1.0 if recipe.better_of(*cells[0]) == "lower" else 1.0
    return sign * (first - second)


def _compare_to_threshold(
    recipe: Recipe, claim: Mapping[str, Any], ours: Numbers
) -> Iterator[ClaimCheck]:
    side, sign = ("above", 1.0) if "above" in claim else ("below", -1.0)
    threshold = float(claim[side])
    for row, column in claim["cells"]:
        place = (_line(recipe, row).label, _line(recipe, column).label)
        values = [numbers.get(place, CellNumber()).value for numbers in (ours, recipe.published)]
        gap, published = (None if value is None else sign * (value - threshold) for value in values)
        yield ClaimCheck(f"{row}, {column} {side} {threshold:g}", gap, published)


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _axis(recipe: Recipe, line: TableLine) -> tuple[TableLine, ...]:
    return recipe.rows if line in recipe.rows else recipe.columns


def _line(recipe: Recipe, label: str) -> TableLine:
    line = recipe.line(label)
    if line is None:
        raise RecipeError(
            f"recipe {recipe.name}: a claim names {label!r}, which is neither a row nor a column"
        )
    return line


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
