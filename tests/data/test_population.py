from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import splits
from remanence.data.population import (
    ClientData,
    FederatedPopulation,
    PartitionIndices,
)
from remanence.data.splits import split_train_valid, validation_size

some_parts = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def cut(sizes: list[int], seed: int = 0) -> list[np.ndarray]:
    """Different rows for each client, in no order."""
    return np.split(Key(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1])


def test_rows_by_hand() -> None:
    rows = PartitionIndices.concat([np.array([4, 2]), np.array([], dtype=np.int64), np.array([7])])
    assert rows.ids.tolist() == [4, 2, 7]
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.sizes.tolist() == [2, 0, 1]
    assert [rows.for_client(client).tolist() for client in range(3)] == [[4, 2], [], [7]]
    assert rows.ids.dtype == rows.offsets.dtype == np.int64


def test_no_clients() -> None:
    rows = PartitionIndices.concat([])
    assert rows.ids.tolist() == []
    assert rows.sizes.tolist() == []


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=8))
def test_joined_rows_can_be_taken_apart(parts: list[list[int]]) -> None:
    rows = PartitionIndices.concat([np.array(part, dtype=np.int64) for part in parts])
    assert [rows.for_client(client).tolist() for client in range(len(parts))] == parts


def test_label_counts_by_hand() -> None:
    """Labels of rows 0 to 5 are 2 0 0 1 2 2: client 0 trains on rows 0, 4 (two twos), client 2
    on 1, 2, 3 (two zeros, a one).
    """
    labels = np.array([2, 0, 0, 1, 2, 2])
    train = PartitionIndices.concat([np.array([0, 4]), np.array([5]), np.array([1, 2, 3])])
    client_data = ClientData(
        train, PartitionIndices.concat([np.array([], dtype=np.int64)] * 3), np.zeros(3, np.int64)
    )
    assert client_data.label_counts(np.array([2, 0]), labels, 4).tolist() == [
        [2, 1, 0, 0],
        [0, 0, 2, 0],
    ]


def test_capacity_is_the_most_any_client_ever_trains_on() -> None:
    def hold(*sizes: int) -> ClientData:
        rows = PartitionIndices.concat(cut(list(sizes)))
        return ClientData(rows, rows, np.zeros(len(sizes), np.int64))

    population = FederatedPopulation((hold(3, 1), hold(2, 5), hold(4, 4)), (np.arange(3),))
    assert (population.num_clients, population.max_client_size) == (2, 5)
    assert population.at(1).train.sizes.tolist() == [2, 5]


@given(some_parts, st.floats(0, 0.9), st.integers(0, 2**32))
def test_settling_divides_everyones_rows_and_loses_none(
    sizes: list[int], validation: float, seed: int
) -> None:
    parts = cut(sizes, seed)
    client_data = split_train_valid(parts, validation, Key(seed))
    assert len(client_data.cluster) == len(sizes)
    for client, part in enumerate(parts):
        train, valid = client_data.train.for_client(client), client_data.valid.for_client(client)
        assert len(train) >= 1
        assert sorted([*train.tolist(), *valid.tolist()]) == sorted(part.tolist())
        expected = (
            min(len(part) - 1, max(1, round(validation * len(part))))
            if validation > 0 and len(part) > 1
            else 0
        )
        assert len(valid) == expected


def test_validation_rows_are_drawn_anew_for_every_client_and_key() -> None:
    rows = np.arange(100)
    first, second = (split_train_valid([rows, rows], 0.2, Key(seed)).valid for seed in (1, 2))
    again = split_train_valid([rows, rows], 0.2, Key(1)).valid
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.for_client(0), first.for_client(1))
    assert not np.array_equal(first.for_client(0), second.for_client(0))


def test_validation_rows_are_those_of_the_clients_own_key() -> None:
    """Client k draws with the key (validation, k), in whatever company, also in several passes."""
    rng = Key(5).fold_in("validation")
    parts = cut([7, 1, 300, 7, 2])
    valid = split_train_valid(parts, 0.3, Key(5)).valid
    for client, part in enumerate(parts):
        count = validation_size(len(part), 0.3)
        drawn = rng.fold_in(client).choice(len(part), count) if count else np.empty(0, np.int64)
        assert np.array_equal(valid.for_client(client), part[drawn])


@pytest.mark.parametrize("at_a_time", [1, 20])
def test_drawing_in_passes_gives_the_same_rows(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = cut([7, 9, 7, 7, 9, 7, 7])
    once = split_train_valid(parts, 0.3, Key(5)).valid
    monkeypatch.setattr(splits, "_DRAWN_AT_A_TIME", at_a_time)
    assert np.array_equal(split_train_valid(parts, 0.3, Key(5)).valid.ids, once.ids)


def test_no_client_of_others_changes_ones_own_rows() -> None:
    """A client's split depends on its number and rows only."""
    alone = split_train_valid([np.arange(20)], 0.3, Key(4))
    together = split_train_valid([np.arange(20), np.arange(20, 60)], 0.3, Key(4))
    assert np.array_equal(alone.valid.for_client(0), together.valid.for_client(0))


def test_clients_without_data_are_refused() -> None:
    parts = [np.array([0]), np.array([], dtype=np.int64), np.array([], dtype=np.int64)]
    with pytest.raises(
        InputError,
        match=r"client 1 has no data \(2 of 3 clients\): use fewer clients or a milder partition",
    ):
        split_train_valid(parts, 0.1, Key(0))
