"""Every form of claim on small numbers, and the sentences and tables made from claims."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from recipes.small_recipe import TABLE

from remanence.recipes.claims import check_claims, evaluate_claims
from remanence.recipes.loader import deep_merge, read_recipe
from remanence.recipes.outcomes import make_outcome
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import CellNumber, Recipe, RecipeError
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
from remanence.recipes.verdicts import (
    FAILS,
    FAILS_SO_FAR,
    HOLDS,
    HOLDS_SO_FAR,
    MIXED,
    TOO_EARLY,
    UNTESTED,
    Basis,
    ClaimCheck,
    ClaimVerdict,
    choose_longest,
    choose_word,
    write_range,
)

NEVER = float("inf")


FULL = Basis(100, 100, 2)  # a full-length training with two seeds


def recipe_with(*claims: dict[str, Any], **changes: Any) -> Recipe:
    return read_recipe("wsm/table-9", deep_merge(TABLE, {"claims": list(claims), **changes}))


def verdict_of(recipe: Recipe, **rows: list[float | None]) -> ClaimVerdict:
    """The first claim on rows a, b, c over columns x, y."""
    numbers = {
        (row, column): CellNumber(value)
        for row, values in rows.items()
        for column, value in zip("xy", values, strict=True)
    }
    bases = {place: FULL for place, number in numbers.items() if number.known}
    return evaluate_claims(recipe, numbers, bases)[0]


BETTER = {"text": "b beats a", "better": "b", "worse": "a"}


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ([1, 1], [2, 3], HOLDS),
        ([1, 5], [2, 3], MIXED),
        ([3, 5], [2, 3], FAILS),
        ([1, None], [2, 3], HOLDS),  # what was not run does not count, half is enough
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
    assert level.word == MIXED


def test_the_size_of_the_gap() -> None:
    recipe = recipe_with({**BETTER, "by": 0.5, "at": ["x"]})
    words = [verdict_of(recipe, a=[1, 0], b=[b, 0]).word for b in (1.5, 1.25, 1.0, 0.5)]
    assert words == [HOLDS, FAILS, FAILS, FAILS]  # the right order alone is not as claimed


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
    assert verdict_of(of_all, **numbers).word == MIXED  # c is better in x
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
    assert ([check.ours for check in verdict.checks], verdict.word) == ([3, -1], MIXED)


def test_marks() -> None:
    above = recipe_with({"text": "s", "cells": [["a", "x"], ["b", "y"]], "above": 10})
    below = recipe_with({"text": "s", "cells": [["a", "x"], ["b", "y"]], "below": 10})
    assert verdict_of(above, a=[11, 0], b=[0, 12]).word == HOLDS
    assert verdict_of(below, a=[11, 0], b=[0, 9]).word == MIXED


def test_a_number_between_two_limits() -> None:
    recipe = recipe_with({"text": "s", "cells": [["a", "x"]], "above": 1, "below": 2})
    words = [verdict_of(recipe, a=[number, 0]).word for number in (0.9, 1, 1.5, 2, 2.5)]
    assert words == [FAILS, FAILS, HOLDS, FAILS, FAILS]


def test_how_many_times_fewer_rounds() -> None:
    """4 times and 2.5 times; a target that the worse never reached is no number of times."""
    recipe = recipe_with({**BETTER, "times": 3}, better="lower")
    verdict = verdict_of(recipe, a=[40, 50], b=[10, 20])
    assert [check.ours for check in verdict.checks] == [4.0, 2.5]
    assert (verdict.word, verdict.ours) == (MIXED, "2.5 to 4.0 times")
    assert verdict_of(recipe, a=[NEVER, NEVER], b=[10, 20]).word == UNTESTED
    assert verdict_of(recipe, a=[10, 20], b=[NEVER, NEVER]).word == FAILS


def test_most_is_more_than_half_and_some_is_one() -> None:
    # against a and c, in x and y: four comparisons
    most, some = (recipe_with({"text": "s", "best": "b", "of": of}) for of in ("most", "some"))
    three: dict[str, list[float | None]] = {"a": [1, 1], "b": [2, 2], "c": [1, 3]}
    two: dict[str, list[float | None]] = {"a": [1, 1], "b": [2, 2], "c": [3, 3]}
    none: dict[str, list[float | None]] = {"a": [3, 3], "b": [2, 2], "c": [3, 3]}
    assert [verdict_of(most, **rows).word for rows in (three, two, none)] == [HOLDS, FAILS, FAILS]
    assert [verdict_of(some, **rows).word for rows in (three, two, none)] == [HOLDS, HOLDS, FAILS]
    with pytest.raises(RecipeError, match="is of all, most or some comparisons, not of 'many'"):
        check_claims(recipe_with({"text": "s", "best": "b", "of": "many"}))


def test_a_claim_with_a_measure_of_its_own() -> None:
    """Its numbers stand beside those of the table."""
    claim = {"text": "s", "cells": [["b", "x"]], "measure": "top", "unit": "share", "above": 0.5}
    recipe = recipe_with(claim)
    numbers = {("b", "x"): CellNumber(0.1), ("b", "x: top"): CellNumber(0.6)}
    (verdict,) = evaluate_claims(recipe, numbers, dict.fromkeys(numbers, FULL))
    assert (verdict.word, verdict.ours) == (HOLDS, "60.0%")
    gap = recipe_with({**BETTER, "measure": "top", "at": ["x"]}, better="lower")
    numbers[("a", "x: top")] = CellNumber(0.4)
    (verdict,) = evaluate_claims(gap, numbers, dict.fromkeys(numbers, FULL))
    assert (verdict.word, verdict.ours) == (HOLDS, "+20.0 points")  # higher is better


@pytest.mark.parametrize(
    ("held", "run", "all_", "share", "seeds", "word"),
    [
        (0, 0, 4, 1.0, 3, UNTESTED),
        (2, 2, 4, 0.5, 2, HOLDS),  # half of each, and two seeds
        (2, 2, 4, 0.49, 2, HOLDS_SO_FAR),
        (2, 2, 5, 0.5, 2, HOLDS_SO_FAR),
        (2, 2, 4, 0.5, 1, HOLDS_SO_FAR),
        (0, 2, 4, 0.5, 2, FAILS),
        (0, 2, 4, 0.49, 2, FAILS_SO_FAR),
        (0, 2, 5, 0.5, 2, FAILS_SO_FAR),
        (0, 2, 4, 0.5, 1, FAILS_SO_FAR),
        (1, 2, 4, 1.0, 3, MIXED),
        (1, 2, 4, 0.1, 1, MIXED),
        (2, 2, 4, 0.1, 2, HOLDS_SO_FAR),  # a tenth is enough to say something
        (2, 2, 4, 0.099, 2, TOO_EARLY),
        (1, 2, 4, 0.099, 2, TOO_EARLY),
        (0, 2, 4, 0.099, 2, TOO_EARLY),
    ],
)
def test_a_verdict_needs_rounds_comparisons_and_seeds(
    held: int, run: int, all_: int, share: float, seeds: int, word: str
) -> None:
    assert choose_word(held, run, all_, share=share, seeds=seeds) == word


@pytest.mark.parametrize(
    ("of", "held", "word"),
    [("most", 2, FAILS), ("most", 3, HOLDS), ("some", 0, FAILS), ("some", 1, HOLDS)],
)
def test_verdicts_on_most_and_some_of_four(of: str, held: int, word: str) -> None:
    assert choose_word(held, 4, 4, share=1.0, seeds=2, of=of) == word
    assert choose_word(held, 4, 4, share=1.0, seeds=2, of=of, too_early=True) == TOO_EARLY


def test_a_verdict_rests_on_its_weakest_number() -> None:
    """The shorter training and the fewer seeds of all comparisons that were run."""
    numbers = {(row, column): CellNumber(float(row == "b")) for row in "ab" for column in "xy"}
    bases = {
        ("a", "x"): Basis(100, 100, 3),
        ("b", "x"): Basis(60, 100, 3),
        ("a", "y"): Basis(40, 50, 2),
        ("b", "y"): Basis(40, 50, 3),
    }
    (verdict,) = evaluate_claims(recipe_with(BETTER), numbers, bases)
    assert (verdict.basis, verdict.word) == (Basis(60, 100, 2), HOLDS)
    del bases["b", "x"]  # not run
    (verdict,) = evaluate_claims(recipe_with(BETTER), numbers, bases)
    assert (verdict.basis, len(verdict.run)) == (Basis(40, 50, 2), 1)


def test_a_claim_can_say_that_it_is_too_early() -> None:
    claim = {**BETTER, "at": ["x"], "too_early": "The gap opens late."}
    numbers = {("a", "x"): CellNumber(1.0), ("b", "x"): CellNumber(2.0)}
    words = []
    for until in ({}, {"until": 50}):
        for rounds in (49, 50, 100):
            bases = dict.fromkeys(numbers, Basis(rounds, 100, 2))
            (verdict,) = evaluate_claims(recipe_with({**claim, **until}), numbers, bases)
            words.append(verdict.word)
    assert words == [TOO_EARLY, TOO_EARLY, TOO_EARLY, TOO_EARLY, HOLDS, HOLDS]


def test_the_longest_run_counts() -> None:
    def verdict(rounds: int, seeds: int, checks: int) -> ClaimVerdict:
        check = ClaimCheck("", 1.0, None, basis=Basis(rounds, 100, seeds))
        return ClaimVerdict("", (check,) * checks)

    untested = ClaimVerdict("", (ClaimCheck("", None, None),))
    assert choose_longest([verdict(10, 3, 9), untested, verdict(50, 1, 1)]) == 2
    assert choose_longest([verdict(50, 3, 1), verdict(50, 1, 2)]) == 1  # then the comparisons
    assert choose_longest([verdict(50, 1, 1), verdict(50, 2, 1)]) == 1  # then the seeds
    assert choose_longest([untested, untested]) == 0


def test_numbers_of_claims_in_words() -> None:
    share, rounds = ClaimCheck("", None, None), ClaimCheck("", None, None, "rounds")
    value = ClaimCheck("", None, None, "percent", "value")
    count = ClaimCheck("", None, None, "count", "value")
    assert write_range([share], [0.0349]) == "+3.5 points"
    assert write_range([share, share], [0.01, -0.02]) == "-2.0 to +1.0 points"
    assert write_range([rounds], [63.0]) == "+63 rounds"
    assert write_range([rounds, rounds], [3.0, NEVER]) == "+3 to ∞ rounds"
    assert write_range([value, value], [-0.01, 1.26]) == "-0.01 to 1.3%"
    assert write_range([count, count], [461.0, 504.0]) == "461 to 504"
    assert write_range([count], [None]) == "-"


def outcome_of(scale: str = "desk", **changes: Any) -> ResultOutcome:
    recipe = read_recipe("wsm/table-9", {**TABLE, "claims": [{**BETTER, "by": 0.1}], **changes})
    ours = {
        ("a", "x"): CellNumber(0.5, 0.01),
        ("b", "x"): CellNumber(0.55),
        ("a", "y"): CellNumber(0.25),
        ("b", "y"): CellNumber(0.2),
    }
    notes = {("a", "y"): "on digits", ("b", "y"): "on digits"}
    return make_outcome(make_plan(recipe, scale), ours, notes, dict.fromkeys(ours, (5, 1)))


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


def test_claims_in_words_state_what_they_rest_on() -> None:
    (text,) = describe_claims(outcome_of())
    assert text == (
        "b beats a NOT SO FAR at scale desk: ours -5.0 to +5.0 points, published +20.0 points;"
        " 0 of 2 comparisons as claimed; 5 of 5 rounds; 1 seed."
    )
    assert describe_disagreements(outcome_of()) == [
        "b against a, x: ours +5.0 points, published +20.0 points, claimed at least +10.0 points",
        "b against a, y: ours -5.0 points, published -, claimed at least +10.0 points",
    ]
    (smoke,) = describe_claims(outcome_of("smoke"))
    assert smoke == "b beats a NOT TESTED: scale smoke only shows that the recipe runs."
    assert describe_disagreements(outcome_of("smoke")) == []


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
