"""The measures as HAST's table A.8 has them: by hand, and against what its authors' program prints
for a curve.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from metrics.small_ledger import evaluated, make_ledger, make_run

from remanence.metrics.drift import convergence_rounds, robustness
from remanence.metrics.drift_as_printed import (
    drops,
    end_accuracies,
    rounds_to_gain,
    validation_curve,
)
from remanence.metrics.drift_curves import DriftCurves
from remanence.recipes import drift_measures as measures
from remanence.recipes.cell_evidence import CellEvidence
from remanence.recipes.recipe import CellNumber


def test_three_time_steps_by_hand() -> None:
    """The first has no number. The second begins at .25 and ends at .75: 90% of the gain is .7,
    passed in round 3; its lowest, .125, is .625 below the end, though the step before ended at 1.
    The third ends where it began, and its first round counts; its lowest is .25 below.
    """
    curve = np.array([
        [0.0, 0.5, 0.75, 1.0],
        [0.25, 0.125, 0.875, 0.75],
        [0.5, 0.25, 0.75, 0.5],
    ])  # fmt: skip
    assert rounds_to_gain(curve).tolist() == [3, 1]
    assert drops(curve).tolist() == [0.625, 0.25]
    assert rounds_to_gain(curve, fraction=0.5).tolist() == [3, 1]
    assert rounds_to_gain(curve, fraction=0.0).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("step", "rounds", "drop"),
    [
        ([0.25, 0.5, 0.75], 3, 0.5),  # the lowest is the first round
        ([0.75, 0.5, 0.25], 1, 0.0),  # no gain: the end is the lowest
        ([0.5, 0.5, 0.5], 1, 0.0),
        ([0.5, 0.0, 0.25], 1, 0.25),  # a loss, with a lower accuracy in between
        ([0.0, 1.0, 0.5], 2, 0.5),  # above the goal before the end
    ],
)
def test_one_time_step_after_a_drift(step: list[float], rounds: int, drop: float) -> None:
    curve = np.array([[1.0, 1.0, 1.0], step])
    assert rounds_to_gain(curve).tolist() == [rounds]
    assert drops(curve).tolist() == [drop]


def test_without_a_drift_there_is_nothing_to_measure() -> None:
    assert rounds_to_gain(np.array([[0.0, 1.0]])).tolist() == []
    assert drops(np.array([[0.0, 1.0]])).tolist() == []


def known_accuracies() -> np.ndarray:
    """[clients, time steps, rounds]: three clients that recover at different speeds from drifts
    of different depth, in four time steps of 30 rounds, in percent.
    """
    client, step, round = np.ogrid[1:4, 0:4, 1:31]
    end = 60 + 5 * step - 3 * client + 0 * round
    dip = 12 * client * (step + 1)
    return end - dip * np.exp(-round / (1 + client * (step + 1))) + 2 * np.sin(round * client)


def test_what_the_authors_program_prints_for_a_known_curve() -> None:
    """What their analyze_results.py prints as Acc, Threshold rounds and Drop for these accuracies
    (run once, on 19 November 2026).
    """
    curve = known_accuracies().mean(axis=0)
    assert curve[:, -1].mean() == pytest.approx(59.11824454752436, rel=1e-12)
    assert rounds_to_gain(curve).mean() == pytest.approx(17.333333333333332, rel=1e-12)
    assert drops(curve).mean() == pytest.approx(58.50153999024431, rel=1e-12)


def test_as_described_the_same_curve_has_other_numbers() -> None:
    """Section 3.5: by client, from the time step before to the lowest of the new one, and with the
    first time step among those that converge.
    """
    accuracy = known_accuracies() / 100
    steps = np.repeat(np.arange(4), 30)
    curves = DriftCurves(
        np.arange(1, 121),
        steps,
        accuracy.transpose(1, 2, 0).reshape(120, 3, 1),
        np.zeros((4, 3), np.int64),
        30,
    )
    assert convergence_rounds(curves).mean == pytest.approx(13.416666666666666)
    assert 100 * robustness(curves) == pytest.approx(55.48479807364524)


def validated(curve: list[list[float]], **fields: Any) -> Any:
    """A run with these accuracies on validation examples, by time step and round."""
    values = [value for step in curve for value in step]
    return SimpleNamespace(
        curve=lambda value: (list(range(1, len(values) + 1)), values),
        config=SimpleNamespace(total_rounds=len(values), rounds=len(curve[0])),
        **fields,
    )


def test_the_curve_is_a_mean_over_seeds() -> None:
    found = validation_curve(
        [validated([[0.0, 0.5], [1.0, 0.5]]), validated([[0.5, 0.5], [0.0, 0.0]])]
    )
    assert found is not None
    assert found.tolist() == [[0.25, 0.5], [0.5, 0.25]]


def test_a_round_without_the_accuracy_leaves_no_curve() -> None:
    missing = validated([[0.0, 0.5], [1.0, 0.5]])
    missing.curve = lambda value: ([1, 2, 4], [0.0, 0.5, 0.5])
    assert validation_curve([missing]) is None
    assert validation_curve([]) is None


def best_models(ends: list[list[int]]) -> Any:
    """A run of two clients, whose best models are right on so many of four test examples at the
    end of each time step, and on all of them in the round before.
    """
    return make_run(
        ledger=make_ledger(
            *(
                evaluated(
                    [right], [4], "personal", client, round=2 * step + 1 + last, time_step=step
                )
                for step, end in enumerate(ends)
                for last, row in enumerate(([4, 4], end))
                for client, right in enumerate(row)
            )
        ),
        clusters=[[0, 0]] * len(ends),
        rounds_per_step=2,
        evaluated="personal",
        clients=2,
    )


def test_accuracy_is_that_on_test_examples_at_the_ends() -> None:
    """Seed 0: 2/8 and 6/8; seed 1: 4/8 and 6/8. Together .375 and .75: mean .5625, deviation over
    the two time steps .1875.
    """
    runs = (best_models([[1, 1], [2, 4]]), best_models([[0, 4], [3, 3]]))
    assert end_accuracies(runs).tolist() == [0.375, 0.75]
    assert measures.performance_as_printed()(CellEvidence(runs, {}, ())) == CellNumber(
        0.5625, 0.1875
    )


def test_the_measures_of_a_recipe() -> None:
    """Of the mean of both seeds: goals in rounds 1 and 2, drops 0 and .5. Deviations are over the
    time steps, as if they were all there are.
    """
    runs = (
        validated([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]),
        validated([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
    )
    evidence = CellEvidence(runs, {}, ())
    assert measures.convergence_as_printed()(evidence) == CellNumber(1.5, 0.5)
    assert measures.robustness_as_printed()(evidence) == CellNumber(0.25, 0.25)
    for measure in (
        measures.performance_as_printed(),
        measures.convergence_as_printed(),
        measures.robustness_as_printed(),
    ):
        assert measure(CellEvidence((), {}, ())) == CellNumber()
    alone = CellEvidence((validated([[0.0, 1.0]]),), {}, ())
    assert measures.robustness_as_printed()(alone) == CellNumber()  # no drift
