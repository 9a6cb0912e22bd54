"""From counts to accuracies: shares of concepts, NaN without warnings, and what a local model
started from.
"""

from __future__ import annotations

import numpy as np
import pytest
from metrics.small_ledger import evaluated, make_ledger, mix_and_train, play_round

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import (
    accuracies_by_model,
    accuracy_of,
    concept_shares,
    divide,
    is_decentralized,
    local_models,
    nan_mean,
)


def test_means_and_quotients_without_examples_are_nan_and_silent() -> None:
    np.testing.assert_array_equal(
        nan_mean(np.array([[np.nan, np.nan], [1.0, np.nan]]), axis=1), [np.nan, 1.0]
    )
    assert nan_mean(np.array([1.0, np.nan, 0.0])) == 0.5
    assert np.isnan(nan_mean(np.zeros(0)))
    np.testing.assert_array_equal(divide(np.array([1, 0]), np.array([4, 0])), [0.25, np.nan])
    np.testing.assert_array_equal(
        accuracy_of(
            np.concatenate(
                [evaluated([1, 2], [4, 4], "merged"), evaluated([0, 0], [0, 0], "merged")]
            )
        ),
        [0.375, np.nan],
    )


def test_concepts_weigh_as_many_clients_as_they_have() -> None:
    """Concept 0 has 10 rows, 5 of each class, and 3/4 of the clients; concept 1 has 4 rows of class
    1 and 1/4.

    Weights of a row: 0.75 / 10 = 0.075 and 0.25 / 4 = 0.0625. Class 0: 5 of 5. Class 1: (0.075 * 0
    + 0.0625 * 4) / (0.075 * 5 + 0.0625 * 4) = 0.25 / 0.625. Over all classes: 0.075 * 5 + 0.0625 *
    4 = 0.625 = 0.75 * acc_0 (1/2) + 0.25 * acc_1 (1).
    """
    records = np.concatenate(
        [evaluated([5, 0], [5, 5], "merged", owner=0), evaluated([0, 4], [0, 4], "merged", owner=1)]
    )
    found = accuracies_by_model(records, concept_shares([[0, 0, 0, 1]]))
    np.testing.assert_allclose(found.per_class, [[1.0, 0.4]], rtol=1e-15)
    assert (found.round.tolist(), found.model.tolist()) == ([1], [-1])


def test_the_shares_of_the_records_time_step_count() -> None:
    """In time step 0 all clients are in concept 0 (0 correct), in step 1 in concept 1 (1 correct)."""
    shares = concept_shares([[0, 0], [1, 1]])
    for step, expected in ((0, 0.0), (1, 1.0)):
        records = np.concatenate(
            [
                evaluated([0], [2], "merged", owner=0, time_step=step),
                evaluated([3], [3], "merged", owner=1, time_step=step),
            ]
        )
        assert accuracies_by_model(records, shares).per_class.tolist() == [[expected]]


def test_a_concept_nobody_is_ever_in_counts_nothing() -> None:
    records = np.concatenate(
        [evaluated([1], [2], "merged", owner=0), evaluated([9], [9], "merged", owner=3)]
    )
    assert accuracies_by_model(records, concept_shares([[0, 0]])).per_class.tolist() == [[0.5]]


def test_several_concepts_without_shares_are_refused() -> None:
    ledger = make_ledger(
        evaluated([1], [2], "local", 0, owner=0), evaluated([1], [2], "local", 0, owner=1)
    )
    with pytest.raises(InputError, match=r"several concepts: .* shares=concept_shares"):
        local_models(ledger)


def test_a_server_hands_out_one_start_to_all() -> None:
    local = local_models(make_ledger(*play_round([4], [3], {2: (0.5, [1]), 7: (0.5, [4])}, [2])))
    assert local.client.tolist() == [2, 7]
    assert local.start.tolist() == [[0.75], [0.75]]
    assert local.end.tolist() == [[0.25], [1.0]]


def test_without_a_server_a_client_starts_from_its_own_mixture() -> None:
    """The model before mixing (1 of 4, 0 of 4) plays no part."""
    ledger = make_ledger(*mix_and_train([4], {0: ([1], [2], [3]), 1: ([0], [4], [1])}))
    assert is_decentralized(ledger)
    local = local_models(ledger)
    assert local.start.tolist() == [[0.5], [1.0]]
    assert local.end.tolist() == [[0.75], [0.25]]


def test_a_local_model_without_its_start_is_left_out() -> None:
    ledger = make_ledger(
        evaluated([1], [2], "before", round=1),
        evaluated([2], [2], "local", 0, round=1),
        evaluated([2], [2], "local", 0, round=2),
    )
    assert local_models(ledger).round.tolist() == [1]


def test_rounds_with_several_global_models_are_left_out() -> None:
    """The ledger does not record whether client 0 started from model -1 or -2 in round 2."""
    ledger = make_ledger(
        *play_round([4], [3], {0: (1.0, [1])}, [2], round=1),
        *play_round([4], [3], {0: (1.0, [1])}, [2], round=2),
        evaluated([4], [4], "before", -2, round=2),
    )
    assert local_models(ledger).round.tolist() == [1]


def test_validation_rows_of_the_participants_count_together() -> None:
    """Clients 0 (2 rows) and 1 (6 rows) are evaluated for model 0; client 5's rows were not, and
    neither side counts them.

    At the start (2 + 3) / 8, at the end (1 + 6) / 8. The pooled record of all clients evaluates other
    examples and is not used.
    """
    ledger = make_ledger(
        evaluated([99], [100], "before", split="valid"),
        evaluated([2], [2], "before", split="valid", owner=0),
        evaluated([3], [6], "before", split="valid", owner=1),
        evaluated([7], [7], "before", split="valid", owner=5),
        evaluated([1], [2], "local", 0, split="valid", owner=0),
        evaluated([6], [6], "local", 0, split="valid", owner=1),
    )
    local = local_models(ledger, "valid")
    assert local.start.tolist() == [[5 / 8]]
    assert local.end.tolist() == [[7 / 8]]
