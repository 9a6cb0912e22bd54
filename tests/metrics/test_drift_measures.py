"""Drift: the thesis' numbers and their companions on curves small enough to follow by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from metrics.small_ledger import evaluated, make_ledger, make_run

from remanence.core.errors import InputError
from remanence.metrics.drift import (
    cluster_curves,
    concept_forgetting,
    convergence_rounds,
    performance,
    recovery_of_mean,
    recovery_rounds,
    robustness,
    summarize_drift,
    time_averaged_accuracy,
    worst_client_curve,
)
from remanence.metrics.drift_curves import DriftCurves, drift_curves, read_curves

NAN = math.nan


def follow(own: Any, steps: list[int], *, every: int = 5, rounds_per_step: int = 10) -> DriftCurves:
    """Clients' accuracies [R, K] recorded every 5 rounds in one concept."""
    accuracy = np.array(own, dtype=float)
    rounds = every * np.arange(1, len(accuracy) + 1)
    return DriftCurves(
        rounds,
        np.array(steps),
        accuracy[:, :, None],
        np.zeros((max(steps) + 1, accuracy.shape[1]), np.int64),
        rounds_per_step,
    )


# Two clients, two steps of 15 rounds, recorded every 5.
TWO = follow(
    [[0.0, 0.5], [0.5, 0.5], [1.0, 0.5], [0.25, 0.25], [0.75, 0.75], [1.0, 0.75]],
    [0, 0, 0, 1, 1, 1],
    rounds_per_step=15,
)


def test_performance_is_the_end_of_each_step() -> None:
    """Ends: step 0 (1 + 1/2) / 2 = 3/4, step 1 (1 + 3/4) / 2 = 7/8; mean 13/16."""
    assert performance(TWO) == 13 / 16


def test_convergence_to_nine_tenths_of_the_gain() -> None:
    """Step 0: client 0 gains 1 from 0, has 9/10 of it at round 15; client 1 gains nothing: not
    applicable. Step 1 begins after round 15: client 0 gains 3/4 from 1/4, 0.925 at its third
    record, 15 rounds in; client 1 gains 1/2 by the second, 10 rounds in.
    """
    found = convergence_rounds(TWO)
    np.testing.assert_array_equal(found.rounds, [[15, NAN], [15, 10]])
    assert found.mean == 40 / 3
    assert found.without == 1
    assert convergence_rounds(TWO, fraction=0.5).rounds[0, 0] == 10


def test_who_ends_below_where_it_began_did_not_converge() -> None:
    """The peak in between is not the step's gain."""
    found = convergence_rounds(follow([[0.5], [1.0], [0.25]], [0, 0, 0]))
    assert math.isnan(found.mean)
    assert found.without == 1


def test_robustness_is_the_end_before_minus_the_worst_after() -> None:
    """Client 0: 1 - 1/4 = 3/4; client 1: 1/2 - 1/4 = 1/4; mean 1/2. The worst need not come
    first.
    """
    assert robustness(TWO) == 0.5
    assert robustness(follow([[0.75], [1.0], [0.5], [1.0]], [0, 1, 1, 1])) == 0.25
    assert robustness(follow([[0.5], [0.75]], [0, 1])) == -0.25  # never fell below
    assert math.isnan(robustness(follow([[0.5], [0.75]], [0, 0])))  # no drift, no number


def test_the_time_average_holds_every_round() -> None:
    """Means of the two clients over six equal intervals: 1/4, 1/2, 3/4, 1/4, 3/4, 7/8: together
    27/8, over 6.
    """
    assert time_averaged_accuracy(TWO) == pytest.approx(27 / 48)


def test_recovery_to_the_level_before_the_drift() -> None:
    """Client 0 is back at 1 after 15 rounds, client 1 above its 1/2 after 10. Their mean was
    3/4 and is there again after 10.
    """
    found = recovery_rounds(TWO)
    assert found.rounds.tolist() == [[15, 10]]
    assert (found.mean, found.without) == (12.5, 0)
    assert recovery_of_mean(TWO) == [10]


def test_who_never_recovers_is_counted_apart() -> None:
    """Three drifts of one client: at once (at its first record, 5 rounds in), never, and from
    the lower level at once again.
    """
    curves = follow(
        [[0.5], [0.75], [0.5], [0.25], [0.25]], [0, 1, 2, 2, 3], every=5, rounds_per_step=5
    )
    found = recovery_rounds(
        DriftCurves(
            np.array([5, 10, 12, 15, 20]), curves.step, curves.by_concept, curves.clusters, 5
        )
    )
    np.testing.assert_array_equal(found.rounds[:, 0], [5, NAN, 5])
    assert (found.mean, found.without) == (5.0, 1)
    nothing = recovery_rounds(follow([[0.5]], [0]))
    assert (nothing.rounds.shape, nothing.without) == ((0, 1), 0)
    assert math.isnan(nothing.mean)
    assert recovery_of_mean(follow([[0.5]], [0])) == []


def test_the_worst_client_over_rounds() -> None:
    assert worst_client_curve(TWO).tolist() == [0.0, 0.5, 0.5, 0.25, 0.75, 0.75]
    np.testing.assert_array_equal(
        worst_client_curve(follow([[0.5, NAN], [NAN, NAN]], [0, 0])), [0.5, NAN]
    )


# Three clients, two concepts, one record a step: 0 and 1 are in concept 0 and swap with 2;
# by_concept [R, K, M].
CLUSTERS = [[0, 0, 1], [1, 1, 0], [0, 1, 1]]
MOVING = DriftCurves(
    np.array([10, 20, 30]),
    np.array([0, 1, 2]),
    np.array([
        [[0.75, 0.0], [1.0, 0.0], [0.25, 1.0]],
        [[0.25, 0.5], [0.5, 1.0], [0.5, 0.5]],
        [[1.0, 0.0], [0.0, 0.75], [0.25, 1.0]],
    ]),
    np.array(CLUSTERS),
    10,
)  # fmt: skip


def test_own_follows_the_client_from_concept_to_concept() -> None:
    assert MOVING.on_own_concept.tolist() == [[0.75, 1.0, 1.0], [0.5, 1.0, 0.5], [1.0, 0.75, 1.0]]


def test_curves_of_the_clusters() -> None:
    """Step 0: concept 0 (3/4 + 1) / 2, concept 1 client 2 alone. An empty cluster has no number."""
    assert cluster_curves(MOVING).tolist() == [[0.875, 1.0], [0.5, 0.75], [1.0, 0.875]]
    alone = DriftCurves(
        MOVING.round, MOVING.step, MOVING.by_concept, np.zeros((3, 3), np.int64), 10
    )
    assert np.isnan(cluster_curves(alone)[:, 1]).all()


def test_what_is_forgotten_of_concepts_that_were_left() -> None:
    """Step 1: client 0 left concept 0 at 3/4 and has 1/4: 1/2; client 1: 1 - 1/2; client 2 left
    concept 1 at 1 and has 1/2. Step 2: client 0 is back in 0 and has left 1 at 1/2, now 0: 1/2;
    client 1 is still away from 0: 1 - 0; client 2 left 0 at 1/2, now 1/4.
    """
    np.testing.assert_array_equal(
        concept_forgetting(MOVING), [[NAN] * 3, [0.5, 0.5, 0.5], [0.5, 1.0, 0.25]]
    )


def test_several_left_concepts_are_averaged() -> None:
    """Left 0 at 1 (now 1/2: lost 1/2) and 1 at 1/2 (now 1: gained 1/2): nothing on balance."""
    accuracy = np.array([[[1.0, 0.0, 0.0]], [[1.0, 0.5, 0.0]], [[0.5, 1.0, 0.5]]])
    curves = DriftCurves(
        np.array([1, 2, 3]), np.array([0, 1, 2]), accuracy, np.array([[0], [1], [2]]), 1
    )
    np.testing.assert_array_equal(concept_forgetting(curves)[:, 0], [NAN, 0.0, 0.0])


def moving_ledger(model_of: Any) -> Any:
    """MOVING's first two records in counts of 4, personal or global."""
    return make_ledger(
        *(
            evaluated(
                [int(4 * MOVING.by_concept[place, client, concept])],
                [4],
                *model_of(client),
                owner=concept,
                round=10 * (place + 1),
                time_step=place,
            )
            for place in range(2)
            for client in range(3)
            for concept in range(2)
        )
    )


def test_curves_from_personal_models() -> None:
    ledger = moving_ledger(lambda client: ("personal", client))
    curves = read_curves(ledger, CLUSTERS, 10, evaluated="personal")
    assert curves.round.tolist() == [10, 20]
    assert curves.step.tolist() == [0, 1]
    np.testing.assert_array_equal(curves.by_concept, MOVING.by_concept[:2])
    same = drift_curves(
        make_run(
            ledger=ledger, clusters=CLUSTERS, rounds_per_step=10, evaluated="personal", clients=3
        )
    )
    np.testing.assert_array_equal(same.on_own_concept, MOVING.on_own_concept[:2])
    assert (same.rounds_per_step, same.steps) == (10, [0, 1])


def test_curves_of_a_global_model_are_refined_where_that_exists() -> None:
    """Every client uses the one model, each on its own concept; round 2's merged model is not
    the one that goes out.
    """
    ledger = make_ledger(
        evaluated([1], [4], "merged", owner=0, round=1), evaluated([2], [4], "merged", owner=1, round=1),
        evaluated([0], [4], "merged", owner=0, round=2), evaluated([0], [4], "merged", owner=1, round=2),
        evaluated([3], [4], "refined", owner=0, round=2), evaluated([4], [4], "refined", owner=1, round=2),
    )  # fmt: skip
    assert read_curves(ledger, [[0, 1, 1]], 2).on_own_concept.tolist() == [
        [0.25, 0.5, 0.5],
        [0.75, 1.0, 1.0],
    ]


def test_without_concepts_the_whole_test_set_is_everybodys() -> None:
    ledger = make_ledger(evaluated([1], [4], "personal", 0), evaluated([3], [4], "personal", 1))
    assert read_curves(ledger, evaluated="personal").on_own_concept.tolist() == [[0.25, 0.75]]
    assert read_curves(
        make_ledger(evaluated([1], [4], "merged")), clients=3
    ).on_own_concept.tolist() == [[0.25] * 3]
    assert read_curves(ledger, [[1, 0]], evaluated="personal").on_own_concept.tolist() == [
        [0.25, 0.75]
    ]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(InputError, match="no test records of the personal model"):
        read_curves(make_ledger(evaluated([1], [4], "merged")), evaluated="personal")
    with pytest.raises(InputError, match="clusters has 1 time steps of 2 clients, the ledger more"):
        read_curves(make_ledger(evaluated([1], [4], "merged", time_step=1)), [[0, 0]])
    with pytest.raises(InputError, match="clusters has 1 time steps of 2 clients, the ledger more"):
        read_curves(make_ledger(evaluated([1], [4], "personal", 2)), [[0, 0]], evaluated="personal")


def test_everything_about_a_run() -> None:
    """Own: step 0 (3/4, 1, 1), step 1 (1/2, 1, 1/2). Performance (11/12 + 8/12) / 2; drops 1/4, 0,
    1/2; the worst 3/4 and 1/2; forgotten 1/2 each. One record a step shows no gain, and only client
    1 is back at its level.
    """
    found = summarize_drift(
        make_run(
            ledger=moving_ledger(lambda client: ("personal", client)),
            clusters=CLUSTERS,
            rounds_per_step=10,
            evaluated="personal",
            clients=3,
        )
    )
    assert found.performance == pytest.approx(19 / 24)
    assert found.convergence.without == 6
    assert found.robustness == 0.25
    assert found.time_averaged == pytest.approx(19 / 24)
    assert (found.recovery.mean, found.recovery.without) == (10.0, 2)
    assert found.worst_client == 0.625
    assert found.concept_forgetting == 0.5


@given(
    arrays.arrays(np.float64, (6, 3), elements=st.floats(0, 1) | st.just(NAN)),
    st.permutations(range(3)),
)
def test_bounds_and_any_order_of_clients(own: np.ndarray, order: list[int]) -> None:
    steps = [0, 0, 1, 1, 2, 2]
    curves, moved = follow(own, steps), follow(own[:, order], steps)
    for measure in (performance, robustness, time_averaged_accuracy):
        number = measure(curves)
        assert math.isnan(number) or -1 <= number <= 1 + 1e-12
        assert measure(moved) == pytest.approx(number, nan_ok=True)
    for rounds_of in (convergence_rounds, recovery_rounds):
        found = rounds_of(curves)
        np.testing.assert_array_equal(rounds_of(moved).rounds, found.rounds[:, order])
        assert np.all(
            np.isnan(found.rounds) | ((found.rounds > 0) & (found.rounds <= curves.rounds_per_step))
        )
        assert found.without == np.isnan(found.rounds).sum()


@given(
    arrays.arrays(np.float64, (4, 2, 2), elements=st.floats(0, 1)),
    arrays.arrays(np.int64, (4, 2), elements=st.integers(0, 1)),
)
def test_nothing_is_forgotten_by_who_never_moves_or_never_drops(
    accuracy: np.ndarray, clusters: np.ndarray
) -> None:
    when = np.arange(4)
    lost = concept_forgetting(DriftCurves(when + 1, when, accuracy, clusters, 1))
    assert np.all(np.isnan(lost) | (np.abs(lost) <= 1))
    assert np.isnan(
        concept_forgetting(DriftCurves(when + 1, when, accuracy, clusters[[0] * 4], 1))
    ).all()
    rising = concept_forgetting(DriftCurves(when + 1, when, np.sort(accuracy, axis=0), clusters, 1))
    assert np.all(np.isnan(rising) | (rising <= 0))
