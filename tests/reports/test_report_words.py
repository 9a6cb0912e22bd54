from __future__ import annotations

from collections.abc import Callable

import pytest

from remanence.metrics.groups import group_runs
from remanence.metrics.summary_rows import make_row
from remanence.reports import setup_table
from remanence.reports.summary_text import summarize_groups
from remanence.results.run import LEDGER, Comparison, Run


def say(*results: Run | Comparison) -> str:
    groups = group_runs(results)
    return " ".join(summarize_groups(groups, [make_row(group) for group in groups]))


def seeds(method: str, ends: list[float], **options: object) -> list[dict[str, object]]:
    return [
        {"method": method, "seed": seed, "shares": [[0.1, 0.1], [end, end]], **options}
        for seed, end in enumerate(ends)
    ]


def test_a_difference_that_the_seeds_separate(make_comparison: Callable[..., Comparison]) -> None:
    """Differences of equal seeds 0.31, 0.30, 0.29: mean 0.3, deviation 0.01, and with t = 4.303 the
    interval is 0.3 ± 0.025.
    """
    cells = seeds("good", [0.79, 0.8, 0.81]) + seeds("bad", [0.48, 0.5, 0.52])
    text = say(make_comparison(cells))
    assert (
        "good has the highest accuracy: 80.0 ± 1.0 % on the test set after round 2, 30.0 points"
        " above the next method, bad (50.0 ± 2.0 %). It is best: the seeds separate it" in text
    )


def test_a_difference_that_the_seeds_do_not_separate(
    make_comparison: Callable[..., Comparison],
) -> None:
    """Differences of equal seeds -0.15 and 0.25."""
    text = say(make_comparison(seeds("loud", [0.4, 0.8]) + seeds("calm", [0.55, 0.55])))
    assert "loud has the highest accuracy" in text
    assert "No method is clearly best: the seeds do not separate it from calm" in text


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (2, "It is best: the seeds separate it"),
        (3, "the seeds do not separate it from b (95 % intervals of the differences between"),
    ],
)
def test_with_more_methods_more_is_needed_to_be_best(
    make_comparison: Callable[..., Comparison], methods: int, words: str
) -> None:
    """Differences 0.02, 0.03, 0.04: mean 0.03, standard error 0.00577. One comparison has t = 4.303
    and the interval 0.03 ± 0.0248, two have t = 6.205 and 0.03 ± 0.0358.
    """
    cells = seeds("a", [0.8, 0.8, 0.8]) + seeds("b", [0.78, 0.77, 0.76])
    if methods == 3:
        cells += seeds("c", [0.3, 0.3, 0.3])
    assert words in say(make_comparison(cells))


def test_one_seed_is_not_enough(make_comparison: Callable[..., Comparison]) -> None:
    text = say(make_comparison(seeds("a", [0.8]) + seeds("b", [0.5])))
    assert "One seed is not enough to tell this from noise: repeat it with --seeds 3." in text
    assert "best:" not in text


def test_equal_methods_are_level(make_comparison: Callable[..., Comparison]) -> None:
    text = say(make_comparison(seeds("a", [0.5]) + seeds("b", [0.5])))
    assert "a and b have the same accuracy: 50.0 %" in text
    assert "highest" not in text


def test_forgetting_names_the_class_that_lost_most(make_run: Callable[..., Run]) -> None:
    """dog: 0.8 -> 0.4 -> 0.6, drops 0.4 and 0, mean 0.2; cat: drops 0 and 0.1, mean 0.05; over
    classes 0.125.
    """
    text = say(make_run([[0.1, 0.8], [0.5, 0.4], [0.4, 0.6]]))
    assert "(gains count as 0): fedavg 12.50 points, most in dog (20.0)" in text
    assert "fedavg has an accuracy of 50.0 % on the test set after round 3" in text


def test_trouble_is_told_plainly(make_comparison: Callable[..., Comparison]) -> None:
    refused = {
        1: [{"client": 7, "code": "not-finite", "reason": ""}],
        2: [{"client": 7, "code": "not-finite", "reason": ""}],
    }
    cells = seeds("a", [0.5], refused=refused, abandoned=[2]) + seeds("b", [0.4], rounds=9)
    text = say(make_comparison(cells))
    assert (
        "a: 2 replies were rejected (client 7, not-finite, 2 times) and did not change the model."
    ) in text
    assert "a: 1 round was abandoned because too few replies were valid (round 2)." in text
    assert "b: 1 of 1 run is unfinished." in text
    assert "No reply was rejected" not in text


def test_the_reason_of_an_abandoned_round_is_stated(
    make_comparison: Callable[..., Comparison],
) -> None:
    comparison = make_comparison(seeds("a", [0.5], abandoned=[2]) + seeds("b", [0.4]))
    run = next(run for run in comparison.runs if run.metrics[1]["abandoned"])
    for line in run.metrics:
        if line["abandoned"]:
            line["problem"] = "the new model holds NaN or infinity"
    wanted = "a: 1 round was abandoned because the new model holds NaN or infinity (round 2)."
    assert wanted in say(comparison)


def test_quiet_runs_are_told_too(make_run: Callable[..., Run]) -> None:
    assert "No reply was rejected and no round was abandoned." in say(make_run([[0.5, 0.5]]))


def test_methods_at_different_rounds_are_told(make_comparison: Callable[..., Comparison]) -> None:
    cells = [
        {"method": "a", "shares": [[0.5, 0.5]] * 3},
        {"method": "b", "shares": [[0.4, 0.4]] * 2, "rounds": 3},
    ]
    assert "compared at different rounds (a 3, b 2)" in say(make_comparison(cells))


def test_nothing_recorded_yet(
    make_run: Callable[..., Run], make_comparison: Callable[..., Comparison]
) -> None:
    assert say(make_run([], rounds=5)).startswith("No round has been evaluated yet")
    assert say(make_comparison([{"method": "a", "shares": None}])).startswith(
        "No round has been evaluated yet"
    )


def test_conditions_of_one_experiment(make_comparison: Callable[..., Comparison]) -> None:
    comparison = make_comparison(
        seeds("a", [0.5, 0.6]) + seeds("b", [0.5, 0.6], local={"batch_size": 8})
    )
    setup = dict(setup_table.describe(group_runs([comparison])))
    assert setup["Seeds"] == "0, 1"
    assert setup["Model"] == "mlp, 1,234 parameters"
    assert setup["Data"] == "fake: 20 training examples"
    assert setup["Evaluation"].startswith(
        "the global model on the whole test set of 200 examples, every round"
    )
    assert setup["Local training"].startswith(
        "1 epoch a round, batches of 32, sgd(lr=0.1), schedule constant (a); 1 epoch a"
        " round, batches of 8"
    )
    assert setup["Versions"] == "remanence 0.1.0, torch 2.13.0, python 3.11.9"


def test_conditions_without_a_ledger_do_not_guess_its_size(make_run: Callable[..., Run]) -> None:
    run = make_run([[0.5, 0.5]])
    (run.folder / LEDGER).unlink()
    assert dict(setup_table.describe(group_runs([run])))["Evaluation"].startswith(
        "the global model on the whole test set, every round"
    )


def test_settings_keep_paths_to_themselves(make_run: Callable[..., Run]) -> None:
    keys = [key for key, _ in setup_table.list_settings(group_runs([make_run([[0.5, 0.5]])]))]
    assert "local.optimizer" in keys
    assert "data.dir" not in keys


@pytest.mark.parametrize(("batch", "expected"), [(32, []), (8, ["local.batch_size"])])
def test_results_of_different_experiments_are_told_apart(
    make_run: Callable[..., Run], batch: int, expected: list[str]
) -> None:
    runs = [
        make_run([[0.5, 0.5]], "one"),
        make_run([[0.5, 0.5]], "two", method="fedavg+wsm", local={"batch_size": batch}),
    ]
    assert setup_table.differences(group_runs(runs)) == expected
