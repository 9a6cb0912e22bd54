"""Where it was lost: rounds worked by hand, and the one promise for any numbers: the parts add
up to the change.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics.small_ledger import evaluated, make_ledger, mix_and_train, play_round, shuffle

from remanence.core.errors import InputError
from remanence.metrics.accuracy_tables import concept_shares
from remanence.metrics.phase_decomposition import (
    PHASES,
    PhaseDecomposition,
    local_losses_by_client,
    phase_decomposition,
)
from remanence.results.ledger import Ledger

NAN = math.nan


def table(lost: PhaseDecomposition) -> dict[str, list[list[float]]]:
    return {phase: part.tolist() for phase, part in lost.parts.items()}


def test_local_aggregation_and_server_by_hand() -> None:
    """Before 4/4; clients with weights 3/4 and 1/4 at 2/4 and 4/4: mean 3/4 * 1/2 + 1/4 * 1 = 5/8;
    merged 1/4; refined 3/4.

    Local 1 - 5/8 = 3/8, aggregation 5/8 - 1/4 = 3/8, server 1/4 - 3/4 = -1/2 (a gain); together 1/4
    = 1 - 3/4.
    """
    lost = phase_decomposition(
        make_ledger(
            *play_round([4], [4], {0: (0.75, [2]), 1: (0.25, [4])}, [1], refined=[3], round=6)
        )
    )
    assert lost.round.tolist() == [6]
    assert table(lost) == {"local": [[0.375]], "aggregation": [[0.375]], "server": [[-0.5]]}
    assert lost.change.tolist() == [[0.25]]
    assert lost.phase_means() == {"local": 0.375, "aggregation": 0.375, "server": -0.5}


def test_classes_are_counted_apart() -> None:
    """Class 0 is lost in training (1 -> 1/2), class 1 in merging (1/2 -> 0), class 2 has no
    examples.
    """
    lost = phase_decomposition(
        make_ledger(*play_round([2, 2, 0], [2, 1, 0], {0: (1.0, [1, 1, 0])}, [1, 0, 0]))
    )
    np.testing.assert_array_equal(lost.parts["local"], [[0.5, 0.0, NAN]])
    np.testing.assert_array_equal(lost.parts["aggregation"], [[0.0, 0.5, NAN]])
    np.testing.assert_array_equal(lost.change, [[0.5, 0.5, NAN]])


def test_a_phase_that_took_no_place_in_a_round_lost_nothing_in_it() -> None:
    """Only round 2 has a drift (4/4 -> 2/4) and only round 3 a server step (2/4 -> 3/4)."""
    still = {0: (1.0, [2])}
    lost = phase_decomposition(
        make_ledger(
            *play_round([4], [4], {0: (1.0, [4])}, [4], round=1),
            *play_round([4], [2], still, [2], before_drift=[4], round=2, time_step=1),
            *play_round([4], [2], still, [2], refined=[3], round=3, time_step=1),
        )
    )
    # in the order of a round
    assert list(lost.parts) == [phase for phase in PHASES if phase != "mixing"]
    assert table(lost) == {
        "drift": [[0], [0.5], [0]],
        "local": [[0]] * 3,
        "aggregation": [[0]] * 3,
        "server": [[0], [0], [-0.25]],
    }
    assert lost.change.tolist() == [[0], [0.5], [-0.25]]


@pytest.mark.parametrize("step_of_the_record", [0, 1])
def test_a_drift_changes_the_weights_of_the_concepts(step_of_the_record: int) -> None:
    """One model throughout, right on concept 0 and wrong on concept 1; before the drift all four
    clients are in 0, after it three are in 1.

    So the drift costs 1 - 1/4 = 3/4 and nothing else loses anything, whichever time step the record
    from before the drift carries.
    """
    records = []
    for owner, right in ((0, 2), (1, 0)):
        records.append(
            evaluated(
                [right], [2], "before_drift", owner=owner, round=5, time_step=step_of_the_record
            )
        )
        records += play_round(
            [2], [right], {3: (1.0, [right])}, [right], owner=owner, round=5, time_step=1
        )
    lost = phase_decomposition(
        make_ledger(*records), shares=concept_shares([[0, 0, 0, 0], [0, 1, 1, 1]])
    )
    assert table(lost) == {"drift": [[0.75]], "local": [[0.0]], "aggregation": [[0.0]]}


def test_concepts_need_their_shares() -> None:
    records = [
        record
        for owner in (0, 1)
        for record in play_round([2], [1], {0: (1.0, [1])}, [1], owner=owner)
    ]
    with pytest.raises(InputError, match="several concepts"):
        phase_decomposition(make_ledger(*records))


def test_without_a_server_mixing_comes_first() -> None:
    """Mixing: client 0 4/4 -> 2/4, client 1 2/4 -> 2/4: mean 3/4 -> 1/2. Training: 2/4 -> 3/4
    and 2/4 -> 1/4: 1/2 -> 1/2.
    """
    lost = phase_decomposition(
        make_ledger(*mix_and_train([4], {0: ([4], [2], [3]), 1: ([2], [2], [1])}))
    )
    assert table(lost) == {"mixing": [[0.25]], "local": [[0.0]]}
    assert lost.change.tolist() == [[0.25]]
    assert lost.clients.clients.tolist() == [0, 1]
    assert lost.clients.loss.tolist() == [[-0.25], [0.25]]


def test_a_peer_recorded_at_some_moments_only_is_left_out() -> None:
    """Client 1 stopped and has no model after training: the level before would else be about
    other clients than the level after.
    """
    ledger = make_ledger(
        *mix_and_train([4], {0: ([4], [2], [3])}),
        evaluated([0], [4], "before", 1),
        evaluated([0], [4], "merged", 1),
    )
    assert table(phase_decomposition(ledger)) == {"mixing": [[0.5]], "local": [[-0.25]]}


def test_peers_in_different_concepts_are_averaged_where_they_have_the_class() -> None:
    """Client 0's concept has class 0 alone, client 1's has class 1 alone: each class is one
    client's.
    """
    ledger = make_ledger(
        *mix_and_train([4, 0], {0: ([4, 0], [2, 0], [2, 0])}, owner=0),
        *mix_and_train([0, 2], {1: ([0, 1], [0, 1], [0, 2])}, owner=1),
    )
    lost = phase_decomposition(ledger, shares=concept_shares([[0, 1]]))
    assert table(lost) == {"mixing": [[0.5, 0.0]], "local": [[0.0, -0.5]]}


def test_rounds_without_local_records_have_no_answer() -> None:
    """An abandoned round has a start and an end but no local training; a round that was not
    recorded locally has an end alone.
    """
    ledger = make_ledger(
        evaluated([1], [2], "before", round=1),
        evaluated([1], [2], "merged", round=1),
        evaluated([1], [2], "merged", round=2),
        *play_round([2], [2], {0: (1.0, [1])}, [1], round=3),
    )
    assert phase_decomposition(ledger).round.tolist() == [3]
    empty = phase_decomposition(make_ledger(evaluated([1, 1], [2, 2], "merged")))
    assert (empty.round.tolist(), empty.parts, empty.change.shape, empty.clients.loss.shape) == (
        [],
        {},
        (0, 2),
        (0, 2),
    )
    assert phase_decomposition(make_ledger(classes=3)).change.shape == (0, 3)


def test_whose_training_forgets() -> None:
    """Client 7 loses 1/2 and then gains 1/4: 1/8 on average. Client 2 takes part once and gains
    1/2.
    """
    ledger = make_ledger(
        *play_round([4], [2], {7: (0.5, [0]), 2: (0.5, [4])}, [2], round=1),
        *play_round([4], [2], {7: (1.0, [3])}, [3], round=2),
    )
    clients, loss = local_losses_by_client(ledger)
    assert clients.tolist() == [2, 7]
    assert loss.tolist() == [[-0.5], [0.125]]


def test_clients_without_known_weights_count_the_same() -> None:
    lost = phase_decomposition(
        make_ledger(*play_round([4], [4], {0: (0.0, [0]), 1: (0.0, [4])}, [2]))
    )
    assert table(lost) == {"local": [[0.5]], "aggregation": [[0.0]]}


@st.composite
def rounds_with_a_server(draw: st.DrawFn) -> Ledger:
    """Two concepts with rows of their own, some classes empty, rounds with and without drift
    and server steps.
    """
    classes, clients = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    totals = [
        draw(st.lists(st.integers(0, 7), min_size=classes, max_size=classes)) for _ in range(2)
    ]
    records = []
    for round in range(1, draw(st.integers(1, 3)) + 1):
        weights = draw(st.lists(st.floats(0.01, 1), min_size=clients, max_size=clients))
        drifted, refined = draw(st.booleans()), draw(st.booleans())
        for owner, total in enumerate(totals):

            def right(total: list[int] = total) -> list[int]:
                return [draw(st.integers(0, rows)) for rows in total]

            local = {
                client: (weight / sum(weights), right()) for client, weight in enumerate(weights)
            }
            extra: dict[str, Any] = {
                "before_drift": right() if drifted else None,
                "refined": right() if refined else None,
            }
            records += play_round(
                total, right(), local, right(), owner=owner, round=round, time_step=1, **extra
            )
    return make_ledger(*records)


SHARES = concept_shares([[0, 0, 1], [0, 1, 1]])


@given(rounds_with_a_server(), st.randoms())
def test_the_parts_add_up_whatever_the_numbers_and_the_order(ledger: Ledger, random: Any) -> None:
    lost = phase_decomposition(ledger, shares=SHARES)
    assert len(lost.round)
    np.testing.assert_allclose(sum(lost.parts.values()), lost.change, atol=1e-12)
    assert np.all(np.isnan(lost.change) | (np.abs(lost.change) <= 1 + 1e-12))
    order = list(range(len(ledger.records)))
    random.shuffle(order)
    again = phase_decomposition(shuffle(ledger, order), shares=SHARES)
    for phase, part in lost.parts.items():
        np.testing.assert_allclose(again.parts[phase], part, atol=1e-12)


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=5))
def test_the_parts_of_peers_add_up(rights: list[tuple[int, int, int]]) -> None:
    ledger = make_ledger(
        *mix_and_train([5], {client: ([a], [b], [c]) for client, (a, b, c) in enumerate(rights)})
    )
    lost = phase_decomposition(ledger)
    np.testing.assert_allclose(lost.parts["mixing"] + lost.parts["local"], lost.change, atol=1e-12)
    np.testing.assert_allclose(
        lost.change, np.mean([(a - c) / 5 for a, _, c in rights]), atol=1e-12
    )


def test_validation_examples_on_which_the_merged_model_was_evaluated_too() -> None:
    """Clients 0 and 1 with 2 rows each: before 4/4; models 0 and 1 at 2/4 and 4/4, weights 1/2;
    merged 3/4. Client 9's rows play no part.
    """
    place = {"split": "valid"}
    records = [
        evaluated([2], [2], moment, owner=owner, **place)
        for moment in ("before",)
        for owner in (0, 1)
    ]
    records += [
        evaluated([right], [2], "local", model, owner=owner, weight=0.5, **place)
        for model, right in ((0, 1), (1, 2))
        for owner in (0, 1)
    ]
    records += [
        evaluated([1], [2], "merged", owner=0, **place),
        evaluated([2], [2], "merged", owner=1, **place),
        evaluated([0], [9], "merged", owner=9, **place),
    ]
    assert table(phase_decomposition(make_ledger(*records), "valid")) == {
        "local": [[0.25]],
        "aggregation": [[0.0]],
    }
