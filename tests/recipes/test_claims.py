"""Every form of claim on small numbers, and the sentences and tables made from claims."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from recipes.small_recipe import TABLE

from remanence.recipes.claims import FAILS, HOLDS, IN_PART, UNTESTED, ClaimVerdict, evaluate_claims
from remanence.recipes.loader import deep_merge, read_recipe
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import CellNumber, Recipe
from remanence.recipes.tables import (
    ResultOutcome,
    as_csv,
    as_markdown,
    as_table,
    describe_claims,
    describe_disagreements,
    write_difference,
    write_number,
)

NEVER = float("inf")


def recipe_with(*claims: dict[str, Any], **changes: Any) -> Recipe:
    return read_recipe("wsm/table-9", deep_merge(TABLE, {"claims": list(claims), **changes}))


def verdict_of(recipe: Recipe, **rows: list[float | None]) -> ClaimVerdict:
    """The first claim on rows a, b, c over columns x, y."""
    numbers = {
        (row, column): CellNumber(value)
        for row, values in rows.items()
        for column, value in zip("xy", values, strict=True)
    }
    return evaluate_claims(recipe, numbers)[0]


BETTER = {"text": "b beats a", "better": "b", "worse": "a"}


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ([1, 1], [2, 3], HOLDS),
        ([1, 5], [2, 3], IN_PART),
        ([3, 5], [2, 3], FAILS),
        ([1, None], [2, 3], HOLDS),  # what was not run does not count
        ([None, None], [2, 3], UNTESTED),
        ([2, 3], [2, 3], FAILS),  # level is not better
    ],
)
def test_one_row_beats_another(a: list[float | None], b: list[float | None], word: str) -> None:
    assert verdict_of(recipe_with(BETTER), a=a, b=b).word == word


def test_lower_can_be_better_and_never_is_worst() -> None:
    recipe = recipe_with(BETTER, better="lower")
    assert verdict_of(recipe, a=[10, NEVER], b=[5, 400]).word == HOLDS
    assert verdict_of(recipe, a=[10, 20], b=[NEVER, 30]).word == FAILS
    level = verdict_of(recipe, a=[10, NEVER], b=[5, NEVER])
    assert [check.ours for check in level.checks] == [5, 0]  # never against never is level
    assert level.word == IN_PART


def test_the_size_of_the_gap() -> None:
    recipe = recipe_with({**BETTER, "by": 0.5, "at": ["x"]})
    words = [verdict_of(recipe, a=[1, 0], b=[b, 0]).word for b in (1.5, 1.25, 1.0, 0.5)]
    # in part: the order is right, the gap is smaller
    assert words == [HOLDS, IN_PART, FAILS, FAILS]


def test_not_far_behind() -> None:
    recipe = recipe_with({**BETTER, "by": -0.5, "at": ["x"]})
    words = [verdict_of(recipe, a=[1, 0], b=[b, 0]).word for b in (1.5, 1.0, 0.5, 0.25)]
    assert words == [HOLDS, HOLDS, HOLDS, FAILS]


def test_the_best_of_all_and_of_some() -> None:
    of_all, of_some = (
        recipe_with({"text": "s", "best": "b"}),
        recipe_with({"text": "s", "best": "b", "among": ["a"]}),
    )
    numbers: dict[str, list[float | None]] = {"a": [1, 1], "b": [2, 2], "c": [3, 1]}
    assert verdict_of(of_all, **numbers).word == IN_PART  # c is better in x
    assert (verdict_of(of_some, **numbers).word, len(verdict_of(of_some, **numbers).checks)) == (
        HOLDS,
        2,
    )


def test_columns_can_be_compared_too() -> None:
    recipe = recipe_with({"text": "s", "better": "y", "worse": "x", "at": ["a", "c"]})
    assert verdict_of(recipe, a=[1, 2], b=[9, 0], c=[1, 2]).word == HOLDS


def test_a_gap_that_is_wider_here_than_there() -> None:
    recipe = recipe_with({**BETTER, "wider": "x", "narrower": "y"})
    assert verdict_of(recipe, a=[1, 5], b=[4, 6]).checks[0].ours == 2  # 3 at x, 1 at y
    assert verdict_of(recipe, a=[1, 5], b=[4, 9]).word == FAILS


def test_a_gap_that_is_widest() -> None:
    """Against every other place: 4 at a, 1 at b, 5 at c."""
    recipe = recipe_with(
        {"text": "s", "better": "y", "worse": "x", "wider": "a", "narrower": ["b", "c"]}
    )
    verdict = verdict_of(recipe, a=[0, 4], b=[1, 2], c=[1, 6])
    assert ([check.ours for check in verdict.checks], verdict.word) == ([3, -1], IN_PART)


def test_marks() -> None:
    above = recipe_with({"text": "s", "cells": [["a", "x"], ["b", "y"]], "above": 10})
    below = recipe_with({"text": "s", "cells": [["a", "x"], ["b", "y"]], "below": 10})
    assert verdict_of(above, a=[11, 0], b=[0, 12]).word == HOLDS
    assert verdict_of(below, a=[11, 0], b=[0, 9]).word == IN_PART


def test_most_is_more_than_half() -> None:
    # against a and c, in x and y: four comparisons
    recipe = recipe_with({"text": "s", "best": "b", "most": True})
    assert verdict_of(recipe, a=[1, 1], b=[2, 2], c=[1, 3]).word == HOLDS
    assert verdict_of(recipe, a=[1, 1], b=[2, 2], c=[3, 3]).word == IN_PART


def outcome_of(scale: str = "desk", **changes: Any) -> ResultOutcome:
    recipe = read_recipe("wsm/table-9", {**TABLE, "claims": [{**BETTER, "by": 0.1}], **changes})
    ours = {
        ("a", "x"): CellNumber(0.5, 0.01),
        ("b", "x"): CellNumber(0.55),
        ("a", "y"): CellNumber(0.25),
        ("b", "y"): CellNumber(0.2),
    }
    plan = make_plan(recipe, scale)
    return ResultOutcome(
        plan,
        ours,
        {("a", "y"): "on digits", ("b", "y"): "on digits"},
        tuple(evaluate_claims(recipe, ours)),
    )


def test_the_table_has_three_numbers_for_one() -> None:
    lines = as_markdown(outcome_of()).splitlines()
    assert lines[0] == (
        "| method | x: published | x: ours | x: difference | y: published | y: ours | y:"
        " difference |"
    )
    assert lines[2] == "| a | 0.400 | 0.500 ± 0.010 | +0.100 | - | 0.250 | - |"
    assert lines[3] == "| b | 0.600 ± 0.020 | 0.550 | -0.050 | NC | 0.200 | - |"
    assert lines[4] == "| c | - | - | - | - | - | - |"
    assert lines[-1].strip() == "y: on digits"


def test_a_wide_table_keeps_the_layout_of_the_paper() -> None:
    many = [{"label": name} for name in "xyzuvw"]
    text = as_markdown(outcome_of(columns=many, published={}))
    assert "| method | x | y | z | u | v | w |" in text
    assert "| a | - / 0.500 ± 0.010 / - |" in text


def test_every_cell_is_a_line_of_the_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(outcome_of()))))
    assert len(rows) == 6
    assert (
        rows[2]
        | {
            "row": "b",
            "column": "x",
            "published": "0.6",
            "published_deviation": "0.02",
            "ours": "0.55",
            "difference": "-0.050",
        }
        == rows[2]
    )
    assert (rows[3]["published"], rows[3]["note"]) == ("NC", "on digits")


def test_the_terminal_gets_what_fits() -> None:
    assert len(as_table(outcome_of(), 200).columns) == 7
    assert len(as_table(outcome_of(), 60).columns) == 5  # a line a cell


def test_claims_in_words_state_the_scale() -> None:
    (text,) = describe_claims(outcome_of())
    assert text == "b beats a HOLDS IN PART at scale desk: 0 of 2 comparisons as claimed."
    assert describe_disagreements(outcome_of()) == [
        "b against a, x: ours +0.05, published +0.2, claimed at least 0.1",
        "b against a, y: ours -0.05, published not printed, claimed at least 0.1",
    ]
    (smoke,) = describe_claims(outcome_of("smoke"))
    assert "NOT TESTED: scale smoke only shows that the recipe runs" in smoke
    assert (outcome_of("smoke").word(), outcome_of().word()) == (UNTESTED, IN_PART)


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (CellNumber(), "share", "-"),
        (CellNumber(None, 0.1), "percent", "-"),
        (CellNumber(float("inf"), None, "never"), "rounds", "never"),
        (CellNumber(33.0, 16.69), "rounds", "33 ± 16.69"),
        (CellNumber(24.66, 17.97), "rounds", "24.66 ± 17.97"),
        (CellNumber(1137.0), "count", "1137"),
        (CellNumber(2.0, None, "0.1, 0.03"), "count", "0.1, 0.03"),
    ],
)
def test_numbers_as_the_papers_print_them(number: CellNumber, unit: str, text: str) -> None:
    assert write_number(number, unit) == text


def test_differences() -> None:
    assert write_difference(CellNumber(112.0), CellNumber(90.0), "rounds") == "-22"
    assert write_difference(CellNumber(5.0), CellNumber(NEVER, None, "never"), "rounds") == "-"
    assert write_difference(CellNumber(50.0), CellNumber(50.0), "percent") == "+0.00"
