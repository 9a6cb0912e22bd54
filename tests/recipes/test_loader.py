"""Every recipe is complete: it parses, its experiments are valid, its published numbers have cells,
and its claims compare something.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remanence.config import Experiment
from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import PARTITIONS
from remanence.experiment.build import check_names
from remanence.recipes import SCALES, list_recipes, load_recipe
from remanence.recipes.claims import check_claims, evaluate_claims
from remanence.recipes.estimate import estimate
from remanence.recipes.figure_data import KINDS
from remanence.recipes.loader import deep_merge, read_number, read_recipe
from remanence.recipes.measures import MEASURES, nearest_round
from remanence.recipes.plan import make_plan
from remanence.recipes.recipe import CellNumber, Recipe, RecipeError
from remanence.recipes.verdicts import Basis

EXPECTED = {
    "wsm": [
        "table-3.1",
        "table-3.2",
        "table-3.3",
        "figure-2.2",
        *(f"figure-3.{n}" for n in range(1, 6)),
        "figure-a.1",
        "figure-a.2",
    ],
    "tce": ["table-1", "table-2", *(f"figure-{n}" for n in range(1, 8))],
    "flashback": ["table-1", *(f"figure-{n}" for n in range(1, 6)), "calibration"],
    "fedwavg": [*(f"table-{n}" for n in range(1, 9)), "figure-2", "figure-3"],
    "hast": [
        "table-a.8",
        "figure-3.3",
        *(f"figure-4.{n}" for n in range(1, 7)),
        *(f"figure-a.{n}" for n in range(1, 8)),
    ],
}


def test_every_result_of_the_papers_is_there() -> None:
    assert list_recipes() == [
        f"{paper}/{name}" for paper, names in EXPECTED.items() for name in names
    ]


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_complete(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.kind == name.split("/")[1].split("-")[0]
    assert (recipe.figure_kind in KINDS) == (recipe.kind == "figure")
    assert set(recipe.published) == {
        (row.label, column.label) for row in recipe.rows for column in recipe.columns
    }
    assert recipe.interpretation
    assert bool(recipe.claims) == (recipe.kind != "calibration")
    check_claims(recipe)
    for scale in SCALES:
        plan = make_plan(recipe, scale)
        assert plan.runs
        assert len({run.name for run in plan.runs}) == len(plan.runs)
        for run in plan.runs:
            check_names(run.experiment)
        for row in plan.rows:
            for column in plan.columns:
                expressions.instantiate(plan.measure_of(row, column), MEASURES, "measure")
    assert all(plan.recipe.scales[scale].description for scale in ("smoke", "desk", "gpu"))
    complete = make_plan(recipe, "paper")
    assert (complete.rows, complete.columns) == (recipe.rows, recipe.columns)


@pytest.mark.parametrize("name", list_recipes())
def test_a_scale_takes_as_long_as_documented(name: str) -> None:
    """smoke: seconds; desk: minutes on two cores; gpu: at most ten minutes on one H200; by the
    estimate, which is what there is without running.
    """
    recipe = load_recipe(name)
    costs = {
        scale: estimate(run.experiment for run in make_plan(recipe, scale).runs)
        for scale in ("smoke", "desk", "gpu")
    }
    assert costs["smoke"].cpu < 5
    assert costs["desk"].cpu < 15 * 60
    assert costs["gpu"].gpu <= 10 * 60


def numbers_of(recipe: Recipe, row: str) -> list[float]:
    return [
        value
        for column in recipe.columns
        if (value := recipe.published[row, column.label].value) is not None
    ]


def test_flashbacks_results_are_of_one_run() -> None:
    """The figures on CIFAR-10 with beta 0.1 read the runs of the table's columns."""
    wanted = planned_experiments("flashback/table-1", "CIFAR-10, beta 0.1, A1")
    assert len(wanted) == 7
    for name in ("figure-1", "figure-2", "figure-5"):
        assert planned_experiments(f"flashback/{name}") == wanted
    assert planned_experiments("flashback/figure-3", "CIFAR-10, beta 0.1") == wanted
    assert planned_experiments("flashback/figure-4", "CIFAR-10, beta 0.1, local") == wanted


def planned_experiments(name: str, column: str = "") -> dict[str, Experiment]:
    """The runs of a recipe at full length, by row."""
    plan = make_plan(load_recipe(name), "paper", only=[column] if column else [])
    return {run.row: run.experiment for run in plan.runs}


def test_flashbacks_setting_is_fedntds_without_a_hold_out() -> None:
    for row, experiment in planned_experiments(
        "flashback/table-1", "CIFAR-10, beta 0.1, A1"
    ).items():
        assert experiment.data.validation == 0
        assert experiment.local.schedule == "exponential(decay=0.99)"
        assert (experiment.record.every, experiment.record.local) == (1, True)
        if row == "MOON":
            assert experiment.method == "moon(mu=5.0, projection=256)"


def test_absolute_targets_are_those_of_the_paper() -> None:
    """Every column of table 1 twice: to a share of our best accuracy, and of the paper's target."""
    recipe = load_recipe("flashback/table-1")
    relative, absolute = recipe.columns[:18], recipe.columns[18:]
    targets = {
        "CIFAR-10, beta 0.1": 0.5,
        "CIFAR-10, beta 0.5": 0.59,
        "CINIC-10, beta 0.1": 0.46,
        "CINIC-10, beta 0.5": 0.48,
        "FEMNIST, 500 clients": 0.72,
        "FEMNIST, 3432 clients": 0.73,
    }
    for one, other in zip(relative, absolute, strict=True):
        target = targets[one.label.rpartition(", ")[0]]
        assert other.label == f"{one.label} of {target:g}"
        assert other.measure == one.measure.replace(")", f", target={target:g})")
        assert other.set == one.set
        for row in recipe.rows:
            assert (
                recipe.published[row.label, one.label] == recipe.published[row.label, other.label]
            )


def test_the_calibration_varies_fedavgs_setting_alone() -> None:
    """Rates, momentum and epochs; everything else is the setting of table 1, but the record."""
    table = planned_experiments("flashback/table-1", "CIFAR-10, beta 0.1, A1")["FedAvg"]
    tried = planned_experiments("flashback/calibration")
    assert len(tried) == 14
    same = {"epochs": table.local.epochs, "lr": table.local.lr, "optimizer": table.local.optimizer}
    for experiment in tried.values():
        local = experiment.local.model_copy(update=same)
        assert experiment.model_copy(update={"local": local, "record": table.record}) == table
    assert table.local in [experiment.local for experiment in tried.values()]
    calibration = load_recipe("flashback/calibration")
    published = load_recipe("flashback/table-1").published
    wanted = [published["FedAvg", f"CIFAR-10, beta 0.1, A{x}"] for x in (".75", ".9", "1")]
    for row in calibration.rows:
        assert [
            calibration.published[row.label, column.label] for column in calibration.columns[:3]
        ] == wanted


def test_table_2_is_the_beginning_of_table_6() -> None:
    """FedWAvg: one run serves both tables, at full length and on one GPU."""
    two, six = load_recipe("fedwavg/table-2"), load_recipe("fedwavg/table-6")
    for scale in ("gpu", "paper"):
        (run,), (other,) = make_plan(two, scale).runs, make_plan(six, scale).runs
        assert run.experiment == other.experiment


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # images of each digit in SVHN's training set
        (
            "fedwavg/table-4",
            [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
        ),
        ("fedwavg/table-5", [5000] * 10),
    ],
)
def test_equal_sizes_leave_out_the_examples_that_a_recipe_names(
    name: str, counts: list[int]
) -> None:
    labels = np.repeat(np.arange(10), counts)
    recipe = load_recipe(name)
    for column in recipe.columns:
        call = expressions.parse_call(column.set["data.partition"])
        partition = expressions.instantiate(call, PARTITIONS, "partition")
        used = sum(len(part) for part in partition(labels, None, None, 10, Key(0)))
        (said,) = [text for text in recipe.interpretation if "equal sizes" in text]
        assert f"{used:,}" in said
        assert f"{len(labels):,}" in said


def test_published_numbers_agree_with_the_text_of_the_papers() -> None:
    """Sentences in the papers that can be computed from their tables: a digit mistyped here
    would break one of them.
    """
    flashback = load_recipe("flashback/table-1")
    rows = {row.label: numbers_of(flashback, row.label) for row in flashback.rows}
    # "improved by up to 29.5x, 54.4x, and 88.5x"; with 3,432 clients FedNTD's 244 rounds against 2
    # would even be 122x
    for columns, factor in (
        (slice(0, 6), 29.5),
        (slice(6, 12), 54.4),
        (slice(12, 15), 88.5),
        (slice(15, 18), 122.0),
    ):
        ratios = [
            other / own
            for row in rows
            if row != "Flashback"
            for other, own in zip(rows[row][columns], rows["Flashback"][columns], strict=True)
        ]
        assert round(max(ratio for ratio in ratios if ratio != float("inf")), 1) == factor
    events = load_recipe("fedwavg/table-1")
    central, federated, increase = (numbers_of(events, row.label) for row in events.rows)
    assert [round(100 * b / a) for a, b in zip(central, federated, strict=True)] == increase
    hast = load_recipe("hast/table-a.8")
    first = {
        column: hast.published["Covariate drift, 4 random", f"accuracy, {column}"].value or 0
        for column in ("Random", "DAC", "HAST")
    }
    assert round(first["HAST"] - max(first["Random"], first["DAC"]), 2) == 5.39
    norms = load_recipe("wsm/table-3.3")
    assert max(number.value or 0 for number in norms.published.values()) == 0.882
    assert norms.published["FedAvg+WSM, batch norm, lr 0.05", "CIFAR-10"].value == 0.882
    # a table that continues in another one
    two, six = load_recipe("fedwavg/table-2"), load_recipe("fedwavg/table-6")
    assert (
        numbers_of(two, "round 100")
        == numbers_of(six, "round 100")
        == [1197, 1129, 0, 1, 0, 1, 2, 0, 3, 5]
    )


@pytest.mark.parametrize("name", list_recipes())
def test_the_papers_own_numbers_do_not_refute_their_claims(name: str) -> None:
    """A claim that fails in the very numbers it was drawn from would be ours, not the paper's.
    A claim of most or some comparisons may fail in the others.
    """
    recipe = load_recipe(name)
    complete = {place: Basis(1, 1, 2) for place, number in recipe.published.items() if number.known}
    verdicts = evaluate_claims(recipe, recipe.published, complete)
    refuted = {
        verdict.text: [check.what for check in verdict.run if not check.as_claimed]
        for verdict in verdicts
        if verdict.of == "all"
    }
    assert not any(refuted.values()), refuted
    # too early: round 1, which the papers' own figures leave open, and rounds before 400 of 500
    words = {verdict.word for verdict in verdicts if not verdict.too_early}
    assert words <= {"holds", "holds so far", "not tested"}


@pytest.mark.parametrize("name", list_recipes())
def test_a_claim_names_its_place_in_the_paper(name: str) -> None:
    for claim in load_recipe(name).claims:
        assert claim["section"]
        assert claim["line"] > 0


def test_published_entries() -> None:
    assert read_number(0.5) == CellNumber(0.5)
    assert read_number(["-", 0.1]) == CellNumber(None, 0.1)
    assert read_number("NC") == CellNumber(None, None, "NC")
    assert read_number("never").value == float("inf")
    assert read_number("0.796 (0.1)") == CellNumber(0.796, None, "0.796 (0.1)")
    assert read_number("0.1").value == 1.0  # a list with one rate in it


SMALL: dict[str, Any] = {
    "title": "t",
    "paper": "p",
    "source": "s",
    "measure": "last",
    "experiment": {"rounds": 5},
    "rows": [{"label": "a", "method": "fedavg"}, {"label": "b", "method": "fedavg+wsm"}],
    "columns": [{"label": "x"}, {"label": "y", "data.name": "mnist"}],
    "claims": [{"text": "b is better", "better": "b", "worse": "a"}],
    "scales": {},
}


def test_a_recipe_from_its_table() -> None:
    recipe = read_recipe(
        "wsm/table-9", deep_merge(SMALL, {"published": {"a": [1, "-"], "b": [[2, 0.5], 3]}})
    )
    assert recipe.published["b", "x"] == CellNumber(2.0, 0.5)
    assert not recipe.published["a", "y"].known
    assert recipe.columns[1].set == {"data.name": "mnist"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"published": {"a": [1, 2]}}, "differ at 'b'"),
        ({"published": {"a": [1], "b": [1, 2]}}, "not one entry for each of 2 columns"),
        ({"rows": [{"label": "a"}, {"label": "a"}]}, "label of its own"),
        (
            {"rows": [{"label": "a", "local.batsch": 3}]},
            "unknown key 'local.batsch': did you mean local.batch_size",
        ),
        ({"scales": {"huge": {}}}, "no scale 'huge'"),
        ({"scales": {"desk": {"rows": ["c"]}}}, "no row or column 'c'"),
        ({"scales": {"desk": {"sset": {}}}}, "unexpected keyword"),
        ({"unit": "miles"}, "unit is one of"),
        ({"color": 1}, "unknown entry 'color'"),
        ({"cells": {"a | z": {}}}, "not there"),
        ({"title": 3}, "title must be str"),
    ],
)
def test_an_invalid_recipe_is_reported_in_one_sentence(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        read_recipe("wsm/table-9", deep_merge(SMALL, change))


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ({"text": "x", "better": "c", "worse": "a"}, "neither a row nor a column"),
        ({"text": "x", "better": "a", "worse": "b", "buy": 3}, "no entry"),
        ({"text": "x", "best": "a", "among": ["a"]}, "compares nothing"),
        ({"text": "x", "better": ["a", "b"], "worse": ["a", "b", "a"]}, "compares 2 with 3"),
    ],
)
def test_an_invalid_claim_is_reported_in_one_sentence(claim: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        check_claims(read_recipe("wsm/table-9", {**SMALL, "claims": [claim]}))


def test_an_unknown_result_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean wsm/table-3\.2"):
        load_recipe("wsm/table3.2")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("table", "figures"),
    [
        ("wsm/table-3.1", ["wsm/figure-2.2", "wsm/figure-a.1", "wsm/figure-a.2"]),
        ("tce/table-1", ["tce/figure-1", "tce/figure-5", "tce/figure-6", "tce/figure-7"]),
    ],
)
def test_heat_maps_show_the_training_of_their_table(
    table: str, figures: list[str], scale: str
) -> None:
    trained = [run.experiment for run in make_plan(load_recipe(table), scale).runs]
    for name in figures:
        assert all(run.experiment in trained for run in make_plan(load_recipe(name), scale).runs)


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("wsm/figure-2.2", 2800),
        ("wsm/figure-a.1", 1),
        ("wsm/figure-a.2", 4000),
        ("tce/figure-1", 2800),
        ("tce/figure-5", 1),
        ("tce/figure-6", 2000),
        ("tce/figure-7", 4000),
    ],
)
def test_a_heat_map_is_of_a_round_that_is_recorded(name: str, rounds: int) -> None:
    plan = make_plan(load_recipe(name), "paper")
    at = plan.measure_of(plan.rows[0], plan.columns[0]).arguments["at"]
    for run in plan.runs:
        record, total = run.experiment.record, run.experiment.total_rounds
        known = [1, *range(record.local_every, total + 1, record.local_every)]
        assert nearest_round(known, at, total) == rounds
        assert (record.local, record.cross) == (True, 20)
    assert str(rounds) in plan.columns[0].label
