"""The claims of a paper as comparisons of numbers.

Every claim is a statement of the paper with `text`, the paper's `section`, and `line`: the line of
the paper's plain text in which the statement stands, with one line for each paragraph. It has one
of these forms:

- `{ better = [...], worse = [...], at = [...], by = 0.0 }`: the cells of one row (or column) are
  better than those of another, by at least `by`; with `by` below zero they are not worse by more.
  With `times` instead of `by` the worse number is at least so many times as large.
- `{ best = "ROW", among = [...], at = [...] }`: no other row is better.
- `{ better, worse, wider = "COLUMN", narrower = "COLUMN" }`: the gap between two rows is larger in
  one column than in another, or than in each of several.
- `{ cells = [["ROW", "COLUMN"], ...], above = x, below = y }`: these cells are above x, below y, or
  both.

With `measure` and its `unit` a claim compares another measure of the same runs. `of = "most"` or
`"some"` says that the paper claims it of more than half, or of at least one of the comparisons.
`too_early` says why a run cannot tell, and `until` before which published round that is so.
`better` follows the measure: fewer rounds and less forgetting are better. `at` names rows or
columns of the other axis; without it, all of them are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remanence.recipes.recipe import CellNumber, Recipe, RecipeError, TableLine
from remanence.recipes.verdicts import ALL, MOST, SOME, Basis, ClaimCheck, ClaimVerdict

_KEYS = {
    "text",
    "section",
    "line",
    "better",
    "worse",
    "best",
    "among",
    "at",
    "by",
    "times",
    "wider",
    "narrower",
    "cells",
    "above",
    "below",
    "measure",
    "unit",
    "of",
    "too_early",
    "until",
}

Place = tuple[str, str]  # the labels of a row and a column
Numbers = Mapping[Place, CellNumber]
Cell = tuple[TableLine, TableLine]


@dataclass(frozen=True)
class Evidence:
    """Our numbers and the published ones, each by place, and what ours rest on."""

    ours: Numbers
    published: Numbers
    bases: Mapping[Place, Basis]

    def basis_of(self, cells: Sequence[Cell], claim: Mapping[str, Any]) -> Basis | None:
        """The weakest basis of some cells; None if one of them was not run."""
        known = [self.bases.get(place_of(claim, *cell)) for cell in cells]
        found = [basis for basis in known if basis is not None]
        if len(found) < len(known):
            return None
        shortest = min(found, key=lambda basis: basis.share)
        return Basis(shortest.rounds, shortest.published, min(basis.seeds for basis in found))


def evaluate_claims(
    recipe: Recipe, ours: Numbers, bases: Mapping[Place, Basis]
) -> list[ClaimVerdict]:
    """Evaluate every claim of a recipe on our numbers.

    Args:
        recipe: The recipe.
        ours: Our numbers.
        bases: What they rest on.
    """
    evidence = Evidence(ours, recipe.published, bases)
    return [
        ClaimVerdict(
            str(claim["text"]),
            tuple(_compare(recipe, claim, evidence)),
            str(claim.get("section", "")),
            int(claim.get("line", 0)),
            str(claim.get("of", ALL)),
            str(claim.get("too_early", "")),
            int(claim.get("until", 0)),
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
        if claim.get("of", ALL) not in (ALL, MOST, SOME):
            raise RecipeError(
                f"recipe {recipe.name}: {claim['text']!r} is of all, most or some comparisons, not"
                f" of {claim['of']!r}"
            )
        if not list(_compare(recipe, claim, Evidence({}, {}, {}))):
            raise RecipeError(f"recipe {recipe.name}: the claim {claim['text']!r} compares nothing")


def place_of(claim: Mapping[str, Any], row: TableLine, column: TableLine) -> Place:
    """Where the number of a cell stands: that of a claim's own measure beside the table's."""
    measure = claim.get("measure", "")
    return row.label, f"{column.label}: {measure}" if measure else column.label


def measured_cells(recipe: Recipe) -> list[tuple[Cell, Mapping[str, Any]]]:
    """The cells for which a claim has a measure of its own, each with the claim: those it names, or
    all.
    """
    everywhere = [(row.label, column.label) for row in recipe.rows for column in recipe.columns]
    return [
        ((_line(recipe, row), _line(recipe, column)), claim)
        for claim in recipe.claims
        if "measure" in claim
        for row, column in claim.get("cells", everywhere)
    ]


def _compare(recipe: Recipe, claim: Mapping[str, Any], evidence: Evidence) -> Iterator[ClaimCheck]:
    if "cells" in claim:
        yield from _compare_to_limits(recipe, claim, evidence)
    elif "wider" in claim:
        yield from _compare_gaps(recipe, claim, evidence)
    else:
        for better, worse in _pairs(recipe, claim):
            for other in _others(recipe, better, claim):
                cells = _cells(recipe, better, worse, other)
                compare, kind = (_ratio, "ratio") if "times" in claim else (_gap, "gap")
                yield ClaimCheck(
                    f"{better.label} against {worse.label}, {other.label}",
                    compare(recipe, claim, cells, evidence.ours),
                    compare(recipe, claim, cells, evidence.published),
                    "times" if kind == "ratio" else _unit(recipe, claim, cells[0]),
                    kind,
                    float(claim.get("times", claim.get("by", 0.0))),
                    basis=evidence.basis_of(cells, claim),
                )


def _compare_gaps(
    recipe: Recipe, claim: Mapping[str, Any], evidence: Evidence
) -> Iterator[ClaimCheck]:
    for (better, worse), narrower in itertools.product(
        _pairs(recipe, claim), _list(claim["narrower"])
    ):
        pairs = [
            _cells(recipe, better, worse, _line(recipe, label))
            for label in (claim["wider"], narrower)
        ]
        gap, published = (
            [_gap(recipe, claim, cells, numbers) for cells in pairs]
            for numbers in (evidence.ours, evidence.published)
        )
        yield ClaimCheck(
            f"{better.label} over {worse.label}, more at {claim['wider']} than at {narrower}",
            _minus(*gap),
            _minus(*published),
            _unit(recipe, claim, pairs[0][0]),
            by=float(claim.get("by", 0.0)),
            basis=evidence.basis_of([*pairs[0], *pairs[1]], claim),
        )


def _compare_to_limits(
    recipe: Recipe, claim: Mapping[str, Any], evidence: Evidence
) -> Iterator[ClaimCheck]:
    limits = {side: float(claim[side]) for side in ("above", "below") if side in claim}
    words = " and ".join(f"{side} {limit:g}" for side, limit in limits.items())
    for labels in claim["cells"]:
        row, column = (_line(recipe, label) for label in labels)
        place = place_of(claim, row, column)
        ours, published = (
            numbers.get(place, CellNumber()).value
            for numbers in (evidence.ours, evidence.published)
        )
        yield ClaimCheck(
            f"{', '.join(place)} {words}",
            ours,
            published,
            _unit(recipe, claim, (row, column)),
            "value",
            **limits,
            basis=evidence.basis_of([(row, column)], claim),
        )


def _unit(recipe: Recipe, claim: Mapping[str, Any], cell: Cell) -> str:
    return str(claim.get("unit") or recipe.unit_of(*cell))


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


def _cells(recipe: Recipe, better: TableLine, worse: TableLine, other: TableLine) -> list[Cell]:
    return [(line, other) if better in recipe.rows else (other, line) for line in (better, worse)]


def _values(
    claim: Mapping[str, Any], cells: Sequence[Cell], numbers: Numbers
) -> list[float | None]:
    return [numbers.get(place_of(claim, *cell), CellNumber()).value for cell in cells]


def _lower_is_better(recipe: Recipe, claim: Mapping[str, Any], cell: Cell) -> bool:
    """A claim's own measure is better when it is higher."""
    return "measure" not in claim and recipe.better_of(*cell) == "lower"


def _gap(
    recipe: Recipe, claim: Mapping[str, Any], cells: Sequence[Cell], numbers: Numbers
) -> float | None:
    """By how much the first cell is better: 0 if neither reached the target, infinite if only one
    of them did.
    """
    first, second = _values(claim, cells, numbers)
    if first is None or second is None:
        return None
    if first == second:
        return 0.0
    sign = -1.0 if _lower_is_better(recipe, claim, cells[0]) else 1.0
    return sign * (first - second)


def _ratio(
    recipe: Recipe, claim: Mapping[str, Any], cells: Sequence[Cell], numbers: Numbers
) -> float | None:
    """How many times the first cell is better; None if the second never reached the target, which
    is no number of times.
    """
    first, second = _values(claim, cells, numbers)
    if _lower_is_better(recipe, claim, cells[0]):
        first, second = second, first
    if not second or first is None or math.isinf(first):
        return None
    return first / second


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
