"""Forgetting: worked by hand, and what must hold for any numbers: no drop is no forgetting,
bounds, NaN, any order of clients.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from metrics.small_ledger import (
    evaluated,
    line,
    make_confusions,
    make_ledger,
    make_run,
    mix_and_train,
    play_round,
    shuffle,
)

from remanence.core.errors import InputError
from remanence.metrics.confusion import confusion_change, confusion_of_forgotten
from remanence.metrics.forgetting import (
    class_drops,
    class_forgetting_since_best,
    client_forgetting,
    client_forgetting_rounds,
    forgetting_curve,
    forgetting_since_best,
    local_forgetting,
    roundwise_forgetting,
)
from remanence.results.ledger import Ledger

NAN = math.nan
shares = st.floats(0, 1) | st.just(NAN)
curves = arrays.arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 4)), elements=shares)


def test_only_drops_count_from_round_to_round() -> None:
    """Round 2: class 0 loses 1/4, class 1 gains, so (1/4 + 0) / 2. Round 3: both lose 1/4.
    Class 2 has no examples.
    """
    table = [[1.0, 0.25, NAN], [0.75, 0.5, NAN], [0.5, 0.25, NAN]]
    np.testing.assert_array_equal(class_drops(table), [[0.25, 0.0, NAN], [0.25, 0.25, NAN]])
    assert roundwise_forgetting(table).tolist() == [0.125, 0.25]


@given(curves)
def test_forgetting_is_bounded_and_nothing_is_forgotten_where_nothing_drops(
    table: np.ndarray,
) -> None:
    lost = roundwise_forgetting(table)
    assert np.all((np.isnan(lost)) | ((lost >= 0) & (lost <= 1)))
    rising = np.sort(np.where(np.isnan(table), 0.0, table), axis=0)
    assert roundwise_forgetting(rising).tolist() == [0.0] * (len(table) - 1)
    assert forgetting_since_best(rising) <= 0
    best = forgetting_since_best(table)
    assert math.isnan(best) or -1 <= best <= 1


@given(curves, st.randoms())
def test_the_order_of_the_rounds_before_the_last_does_not_matter_to_the_best(
    table: np.ndarray, random: Random
) -> None:
    earlier = list(range(len(table) - 1))
    random.shuffle(earlier)
    np.testing.assert_array_equal(
        class_forgetting_since_best(table[[*earlier, -1]]), class_forgetting_since_best(table)
    )


def test_the_last_round_against_the_best_before() -> None:
    """Class 0: best 3/4 in round 2, last 1/4, lost 1/2. Class 1: best before 1/4, last 1/2,
    gained 1/4. Class 2 unknown. Mean 1/8.
    """
    table = [[0.5, 0.25, NAN], [0.75, NAN, NAN], [0.25, 0.5, 1.0]]
    np.testing.assert_array_equal(class_forgetting_since_best(table), [0.5, -0.25, NAN])
    assert forgetting_since_best(table) == 0.125
    assert math.isnan(forgetting_since_best([[0.5, 0.5]]))  # nothing to compare with


def test_the_curve_of_a_run_is_about_the_model_that_counts() -> None:
    lines = [
        line(1, 0.5, [1.0, None]), line(1, 0.1, [0.0, 0.0], split="valid"), line(2), line(3, 0.5, [0.75, None]), line(4, 0.5, [None, None]),
        line(3, 0.5, [0.5, 0.5], model="personal"), line(6, 0.5, [0.25, 0.5], model="personal"),
    ]  # fmt: skip
    assert forgetting_curve(make_run(lines)) == {3: 0.25}
    assert forgetting_curve(make_run(lines, evaluated="personal")) == {6: 0.125}
    assert forgetting_curve(make_run(lines[:1])) == {}


def test_local_forgetting_with_a_server() -> None:
    """At the start (4/4, 2/4). Client 3: (2/4, 4/4) loses 1/2 of class 0, mean 1/4. Client 5: (4/4,
    1/4) loses 1/4 of class 1, mean 1/8. Class 2 is absent.
    """
    lost = local_forgetting(
        make_ledger(
            *play_round(
                [4, 4, 0], [4, 2, 0], {5: (0.5, [4, 1, 0]), 3: (0.5, [2, 4, 0])}, [3, 3, 0], round=9
            )
        )
    )
    assert lost.round.tolist() == [9, 9]
    assert lost.client.tolist() == [3, 5]
    assert lost.value.tolist() == [0.25, 0.125]
    np.testing.assert_array_equal(lost.per_class, [[0.5, 0, NAN], [0, 0.25, NAN]])


def test_local_forgetting_without_a_server_begins_after_mixing() -> None:
    """Mixing took 4/4 to 2/4, training took that to 1/4: the training forgot 1/4."""
    assert local_forgetting(
        make_ledger(*mix_and_train([4], {0: ([4], [2], [1])}))
    ).value.tolist() == [0.25]


def test_nothing_recorded_is_nothing_forgotten() -> None:
    lost = local_forgetting(make_ledger(evaluated([1, 1], [2, 2], "merged")))
    assert lost.value.shape == (0,)
    assert lost.per_class.shape == (0, 2)
    assert local_forgetting(make_ledger(classes=3)).per_class.shape == (0, 3)


def cross(
    round: int, clients: list[int], before: list[int], after: list[list[int]], rows: int = 4
) -> list[np.ndarray]:
    """Clients' models on each other's validation rows, `rows` each."""
    place = {"split": "valid", "round": round}
    made = [
        evaluated([right], [rows], "before", owner=owner, **place)
        for owner, right in zip(clients, before, strict=True)
    ]
    for model, rights in zip(clients, after, strict=True):
        made += [
            evaluated([right], [rows], "local", model, owner=owner, **place)
            for owner, right in zip(clients, rights, strict=True)
        ]
    return made


# Clients 2, 5, 9. Before: 2/4, 4/4, 0/4. Rows are models, columns are data.
BEFORE, AFTER = [2, 4, 0], [[4, 1, 0], [2, 4, 2], [0, 0, 4]]


def test_client_forgetting_by_hand() -> None:
    """F[k, i] = Acc_i(w_t) - Acc_i(w_k): row 2: 1/2 - 1, 1 - 1/4, 0 - 0; row 5: 0, 0, 0 - 1/2; row
    9: 1/2, 1, 0 - 1. F_k without the diagonal: (3/4 + 0) / 2, (0 - 1/2) / 2, (1/2 + 1) / 2.
    """
    found = client_forgetting(make_ledger(*cross(3, [2, 5, 9], BEFORE, AFTER)))
    assert found.round == 3
    assert found.clients.tolist() == [2, 5, 9]
    assert found.before.tolist() == [0.5, 1.0, 0.0]
    assert found.after.tolist() == [[1.0, 0.25, 0.0], [0.5, 1.0, 0.5], [0.0, 0.0, 1.0]]
    assert found.difference.tolist() == [[-0.5, 0.75, 0.0], [0.0, 0.0, -0.5], [0.5, 1.0, -1.0]]
    assert found.mean.tolist() == [0.375, -0.25, 0.75]


@given(st.permutations(range(12)))
def test_the_order_of_records_does_not_matter(order: list[int]) -> None:
    ledger = make_ledger(*cross(3, [2, 5, 9], BEFORE, AFTER))
    np.testing.assert_array_equal(
        client_forgetting(shuffle(ledger, order)).difference, client_forgetting(ledger).difference
    )


@given(arrays.arrays(np.int64, (3, 4), elements=st.integers(0, 4)), st.permutations(range(3)))
def test_client_forgetting_is_bounded_and_renumbering_clients_only_moves_it(
    right: np.ndarray, order: list[int]
) -> None:
    """`right` holds the before row as its last column; client i becomes client order[i]."""
    before, after = right[:, 3], right[:, :3]
    found = client_forgetting(make_ledger(*cross(1, [0, 1, 2], before.tolist(), after.tolist())))
    assert np.abs(found.difference).max() <= 1
    moved = client_forgetting(make_ledger(*cross(1, order, before.tolist(), after.tolist())))
    np.testing.assert_array_equal(moved.difference[np.ix_(order, order)], found.difference)
    np.testing.assert_allclose(moved.mean[order], found.mean, atol=1e-15)
    same = client_forgetting(
        make_ledger(*cross(1, [0, 1, 2], before.tolist(), [before.tolist()] * 3))
    )
    assert same.mean.tolist() == [0.0] * 3


def test_a_client_without_validation_rows_is_left_out_of_the_means() -> None:
    """Client 1 has no rows: column NaN, and F_0 has nothing to average; F_1 is about client 0
    alone.
    """
    ledger = make_ledger(
        evaluated([2], [4], "before", split="valid", owner=0), evaluated([4], [4], "local", 0, split="valid", owner=0),
        evaluated([1], [4], "local", 1, split="valid", owner=0),
    )  # fmt: skip
    found = client_forgetting(ledger)
    assert found.clients.tolist() == [0, 1]
    np.testing.assert_array_equal(found.difference, [[-0.5, NAN], [0.25, NAN]])
    np.testing.assert_array_equal(found.mean, [NAN, 0.25])


def test_the_round_can_be_chosen() -> None:
    ledger = make_ledger(
        *cross(3, [0, 1], [4, 4], [[4, 4], [4, 4]]), *cross(7, [0, 1], [4, 4], [[4, 0], [0, 4]])
    )
    assert client_forgetting_rounds(ledger) == [3, 7]
    assert client_forgetting(ledger).mean.tolist() == [1.0, 1.0]
    assert client_forgetting(ledger, 3).mean.tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match=r"^round 4 has no .* recorded are 2 rounds from 3 to 7$"):
        client_forgetting(ledger, 4)


def test_pooled_validation_rows_are_not_a_clients_rows() -> None:
    ledger = make_ledger(
        evaluated([1], [2], "before", split="valid"), *play_round([2], [1], {0: (1.0, [1])}, [1])
    )
    assert client_forgetting_rounds(ledger) == []
    with pytest.raises(InputError, match=r"run with record\.local = true"):
        client_forgetting(ledger)


def test_what_a_forgotten_class_became() -> None:
    """Of 4 cats 3 were right and 1 a dog; now 1 is right, 1 a dog, 2 birds. The number of dogs
    differs between the rounds: rates, not counts.
    """
    gone = confusion_change([[3, 1, 0], [0, 2, 0], [0, 0, 0]], [[1, 1, 2], [2, 6, 0], [0, 0, 0]])
    np.testing.assert_array_equal(gone, [[-0.5, 0.0, 0.5], [0.25, -0.25, 0.0], [NAN] * 3])


@given(arrays.arrays(np.int64, (2, 3, 3), elements=st.integers(0, 9)))
def test_what_a_class_lost_went_somewhere(pair: np.ndarray) -> None:
    rows = confusion_change(*pair).sum(axis=1)
    assert np.all(np.isnan(rows) | (np.abs(rows) < 1e-12))
    np.testing.assert_array_equal(np.isnan(rows), (pair.sum(axis=2) == 0).any(axis=0))


def test_the_forgotten_class_between_two_recorded_rounds() -> None:
    confusions = make_confusions(
        (1, [[4, 0], [0, 4]]), (2, [[2, 2], [0, 4]]), (3, [[1, 3], [0, 4]])
    )
    assert confusion_of_forgotten(confusions, 0).tolist() == [-0.75, 0.75]
    assert confusion_of_forgotten(confusions, 0, (1, 2)).tolist() == [-0.5, 0.5]
    assert confusion_of_forgotten(confusions, 1).tolist() == [0.0, 0.0]
    with pytest.raises(
        InputError, match="round 9 has no confusion matrix: recorded are 3 rounds from 1 to 3"
    ):
        confusion_of_forgotten(confusions, 0, (1, 9))
    with pytest.raises(InputError, match=r"1 were recorded: run with record\.confusion = true"):
        confusion_of_forgotten(confusions[:1], 0)


def test_the_finished_round_is_the_refined_one() -> None:
    merged = make_confusions((1, [[4, 0], [0, 4]]), (2, [[0, 4], [0, 4]]))
    refined = make_confusions((1, [[4, 0], [0, 4]]), (2, [[3, 1], [0, 4]]), moment="refined")
    both = np.concatenate([merged, refined])
    assert confusion_of_forgotten(both, 0).tolist() == [-0.25, 0.25]
    assert confusion_of_forgotten(both, 0, moment="merged").tolist() == [-1.0, 1.0]


def test_a_measure_does_not_change_the_ledger() -> None:
    ledger = make_ledger(*play_round([4], [3], {0: (1.0, [1])}, [2]))
    content = ledger.records.tobytes()
    ledger.records.flags.writeable = False  # as a ledger read from a file
    local_forgetting(Ledger(ledger.records, ledger.class_names))
    assert ledger.records.tobytes() == content
