"""Plans of recipes: shared runs, smaller scales, substitute data, and changes by the user."""

from __future__ import annotations

from typing import Any

import pytest

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.recipes.estimate import describe_plan, estimate_run
from remanence.recipes.loader import read_recipe
from remanence.recipes.plan import change_options, make_plan, source_of
from remanence.recipes.recipe import Recipe

TABLE: dict[str, Any] = {
    "title": "t",
    "paper": "p",
    "source": "s",
    "measure": "last",
    "experiment": {
        "rounds": 50,
        "data": {"name": "femnist"},
        "model": "resnet18(norm=group)",
        "local": {"epochs": 3},
    },
    "rows": [
        {"label": "a", "method": "fedavg"},
        {"label": "b", "method": "fedavg+wsm"},
        {"label": "mean", "mean": ["a", "b"]},
    ],
    "columns": [
        {"label": "last", "measure": "last"},
        {"label": "top", "measure": "top"},
        {"label": "cifar", "data.name": "cifar10", "measure": "mean_last(classes=4)"},
    ],
    "claims": [{"text": "b is better", "better": "b", "worse": "a"}],
    "scales": {
        "smoke": {"set": {"data.name": "digits", "rounds": 2}},
        "desk": {
            "rows": ["a"],
            "options": {"model:resnet18.width": 8},
            "measure": "mean_last(rounds=5)",
        },
        "gpu": {
            "seeds": 2,
            "by_row": {"b": {"local.steps": 7}},
            "by_column": {"cifar": {"rounds": 9}},
        },
    },
    "substitute_data": {
        "femnist": {"description": "EMNIST", "set": {"data.name": "emnist", "clients.count": 7}}
    },
}


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe("wsm/table-9", TABLE)


def test_cells_that_need_the_same_run_share_it(recipe: Recipe) -> None:
    """Two measures of one experiment are one run: 2 methods x 2 datasets, not 2 x 3."""
    plan = make_plan(recipe, "paper")
    assert [run.name for run in plan.runs] == [
        "a-last-seed0",
        "a-cifar-seed0",
        "b-last-seed0",
        "b-cifar-seed0",
    ]
    assert plan.cells["a", "last"].runs == plan.cells["a", "top"].runs == (("", ("a-last-seed0",)),)
    assert plan.cells["mean", "last"].runs == ()


def test_a_scale_has_the_last_word(recipe: Recipe) -> None:
    plan = make_plan(recipe, "smoke")
    assert {(source_of(run.experiment), run.experiment.rounds) for run in plan.runs} == {
        ("digits", 2)
    }
    assert len(plan.runs) == 2  # both columns are the same experiment now
    assert plan.cells["a", "cifar"].other == "digits"  # which a note states
    assert make_plan(recipe, "paper").cells["a", "cifar"].other == ""


def test_rows_columns_seeds_and_single_cells_of_a_scale(recipe: Recipe) -> None:
    desk, gpu = make_plan(recipe, "desk"), make_plan(recipe, "gpu")
    assert [row.label for row in desk.rows] == ["a"]  # without b there is no mean
    assert {run.experiment.model for run in desk.runs} == {"resnet18(norm=group, width=8)"}
    assert len(gpu.runs) == 8
    steps = {run.row: (run.experiment.local.steps, run.experiment.local.epochs) for run in gpu.runs}
    assert steps == {"a": (0, 3), "b": (7, 0)}  # steps mean instead of epochs
    assert {run.column: run.experiment.rounds for run in gpu.runs} == {"last": 50, "cifar": 9}


def test_the_measure_of_a_cell(recipe: Recipe) -> None:
    desk = make_plan(recipe, "desk")
    row, last, top, cifar = desk.rows[0], *desk.columns
    # the scale changes its own measure in every cell, keeps its other options, and leaves
    # other measures alone
    assert [str(desk.measure_of(row, column)) for column in (last, top, cifar)] == [
        "last",
        "top",
        "mean_last(classes=4, rounds=5)",
    ]


def test_options_of_rows_and_columns_are_joined() -> None:
    both = {
        "rows": [
            {"label": "early", "measure": "forgettable(at=0.1)"},
            {"label": "late", "measure": "forgettable(at=1.0)"},
        ],
        "columns": [
            {"label": "first", "measure": "forgettable(client=0)"},
            {"label": "third", "measure": "forgettable(client=2)"},
        ],
    }
    plan = make_plan(
        read_recipe("wsm/table-9", {**TABLE, **both, "claims": [], "scales": {}}), "paper"
    )
    assert str(plan.measure_of(plan.rows[1], plan.columns[1])) == "forgettable(client=2, at=1.0)"
    assert len(plan.runs) == 1


def test_what_is_absent_is_left_out_or_replaced(recipe: Recipe) -> None:
    without = make_plan(recipe, "paper", absent=["femnist"])
    assert [run.column for run in without.runs] == ["cifar", "cifar"]
    assert without.cells["a", "top"].missing_data == "femnist"
    replaced = make_plan(recipe, "paper", absent=["femnist"], substitute_data=True)
    assert [
        (run.substitute, source_of(run.experiment), run.experiment.clients.count)
        for run in replaced.runs
    ] == [
        ("femnist", "emnist", 7),
        ("", "cifar10", None),
        ("femnist", "emnist", 7),
        ("", "cifar10", None),
    ]
    neither = make_plan(recipe, "paper", absent=["femnist", "emnist"], substitute_data=True)
    assert neither.cells["a", "last"].missing_data == "emnist"
    # allowed, but not needed
    assert make_plan(recipe, "paper", substitute_data=True).cells["a", "last"].substitute == ""


def test_only_some_rows(recipe: Recipe) -> None:
    assert {run.row for run in make_plan(recipe, "paper", only=["B"]).runs} == {"b"}
    # also one that the scale leaves out
    assert {run.row for run in make_plan(recipe, "desk", only=["b"]).runs} == {"b"}
    assert {
        (run.row, run.column) for run in make_plan(recipe, "paper", only=["a", "cifar"]).runs
    } == {("a", "cifar")}
    with pytest.raises(InputError, match="has no row 'c'"):
        make_plan(recipe, "paper", only=["c"])


def test_a_row_computed_from_others_brings_their_runs(recipe: Recipe) -> None:
    plan = make_plan(recipe, "paper", only=["mean", "top"])
    assert [row.label for row in plan.rows] == ["a", "b", "mean"]
    assert [(run.row, run.column) for run in plan.runs] == [("a", "top"), ("b", "top")]


def test_what_a_user_changes(recipe: Recipe) -> None:
    assert {
        run.experiment.rounds for run in make_plan(recipe, "gpu", changes={"rounds": 500}).runs
    } == {500}
    assert {
        run.experiment.local.epochs
        for run in make_plan(recipe, "paper", changes={"local.steps": 4}).runs
    } == {0}
    assert {run.seed for run in make_plan(recipe, "paper", seeds=3).runs} == {0, 1, 2}
    with pytest.raises(InputError, match="at least one seed"):
        make_plan(recipe, "paper", seeds=0)


def test_values_tried_in_every_cell() -> None:
    tried = {
        **TABLE,
        "grid": {"local.lr": [0.1, 0.5]},
        "columns": [{"label": "best", "measure": "best_over"}],
    }
    tried["scales"] = {"smoke": {"grid": {"local.lr": [0.5]}}}
    plan = make_plan(read_recipe("wsm/table-9", tried), "paper")
    assert plan.cells["a", "best"].runs == (
        ("lr=0.1", ("a-best-lr=0.1-seed0",)),
        ("lr=0.5", ("a-best-lr=0.5-seed0",)),
    )
    assert [run.experiment.local.lr for run in plan.runs] == [0.1, 0.5, 0.1, 0.5]
    assert [
        run.experiment.local.lr
        for run in make_plan(read_recipe("wsm/table-9", tried), "smoke").runs
    ] == [0.5, 0.5]


def test_options_inside_expressions() -> None:
    experiment = parse_experiment(
        changes={"method": "fedprox(mu=0.1)+wsm", "data.partition": "dirichlet(alpha=0.5)"}
    )
    changed = change_options(
        experiment,
        {"method:fedprox.mu": 0.2, "method:feddf.steps": 3, "data.partition:dirichlet.samples": 9},
    )
    assert (changed.method, changed.data.partition) == (
        "fedprox(mu=0.2)+wsm",
        "dirichlet(alpha=0.5, samples=9)",
    )
    with pytest.raises(InputError, match=r"key:name\.option"):
        change_options(experiment, {"model.width": 3})


def test_an_estimate_by_hand() -> None:
    """mlp(hidden=10) on digits has 64 x 10 + 10 + 10 x 10 + 10 = 760 parameters, so 1,520
    operations forward, and 3 layers (linear, relu, linear). 5 clients of round(287 x 0.9) = 258
    rows for 2 epochs and 10 rounds are 25,800 examples, each three times 1,520; 10 + 1 evaluations on 359
    test rows and 143.8 validation rows come on top. 5 clients make 2 x 5 steps of 64 a round, 60
    microseconds a layer; and a round takes 5 ms whatever it does.
    """
    experiment = parse_experiment(
        changes={
            "data.name": "digits",
            "model": "mlp(hidden=10)",
            "clients.count": 5,
            "rounds": 10,
            "local.epochs": 2,
            "local.batch_size": 64,
        }
    )
    work = 1_520 * (3 * 25_800 + 11 * (359 + 143.8))
    assert estimate_run(experiment).cpu == pytest.approx(
        work / 4e10 + 10 * 5 * 10 * 3 * 6e-5 + 10 * 0.005
    )


def test_a_plan_in_words(recipe: Recipe) -> None:
    text = describe_plan(make_plan(recipe, "gpu", absent=["femnist"], seeds=1))
    assert "a, cifar: 9 rounds, about" in text
    assert "left out, femnist is not in the data folder: LEAF makes it" in text
    assert "2 runs, 18 rounds in all: about" in text
    assert "as substitute for femnist" in describe_plan(
        make_plan(recipe, "gpu", absent=["femnist"], substitute_data=True)
    )
