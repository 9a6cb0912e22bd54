from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data.structured_partitions import by_group, label_clusters

CIFAR = np.repeat(np.arange(10), 50)


def test_the_papers_clusters_have_disjoint_labels_and_equal_clients() -> None:
    """9 clients as 2:3:4 over labels 3:3:4 of 500 rows: pools 150, 150, 200, so 75, 50, 50 rows
    a client are possible: all get 50.
    """
    shares = label_clusters(clients="2:3:4", classes="3:3:4")(CIFAR, None, 9, 10, Key(0))
    assert [len(share) for share in shares] == [50] * 9
    cluster = [0, 0, 1, 1, 1, 2, 2, 2, 2]
    allowed = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8, 9}]
    for share, number in zip(shares, cluster, strict=True):
        assert set(CIFAR[share].tolist()) <= allowed[number]
        assert (np.diff(share) > 0).all()
    assert len(np.unique(np.concatenate(shares))) == 450


def test_explicit_labels_leave_the_others_out() -> None:
    shares = label_clusters(clients="1:2", classes="8,1|3", samples=20)(
        CIFAR, None, None, 10, Key(0)
    )
    assert [len(share) for share in shares] == [20, 20, 20]
    assert set(CIFAR[shares[0]].tolist()) == {1, 8}
    assert set(CIFAR[np.concatenate(shares[1:])].tolist()) == {3}
    assert not set(shares[1]) & set(shares[2])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"clients": "2;3"}, "cannot read clients"),
        ({"clients": "2:0:4"}, "cannot read clients"),
        ({"clients": ""}, "cannot read clients"),
        ({"classes": "3-3-4"}, "cannot read classes"),
        ({"classes": "0,1|1,2|3"}, "a label in two clusters"),
        ({"classes": "3:0:4"}, "a cluster without labels"),
        ({"classes": "5:5"}, "3 clusters in '2:3:4' but 2 in '5:5'"),
        ({"samples": -1}, "-1 samples"),
    ],
)
def test_clusters_that_make_no_sense_are_refused(
    options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        label_clusters(**options)  # type: ignore[arg-type]


def test_clusters_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(InputError, match=r"2:3:4 = 9 clients but clients.count is 10"):
        label_clusters()(CIFAR, None, 10, 10, Key(0))
    with pytest.raises(InputError, match=r"uses label 9 .* labels 0 to 4"):
        label_clusters()(CIFAR % 5, None, 9, 5, Key(0))
    with pytest.raises(
        InputError, match="51 examples because cluster 1 has 150 examples for 3 clients"
    ):
        label_clusters(samples=51)(CIFAR, None, 9, 10, Key(0))
    with pytest.raises(InputError, match="1 examples because cluster 0 has 0 examples"):
        label_clusters(clients="1:1", classes="0|1")(
            np.ones(5, dtype=np.int64), None, 2, 10, Key(0)
        )


def test_one_client_a_group_holds_exactly_that_group() -> None:
    groups = np.array([7, 3, 7, 9, 3, 7])
    shares = by_group()(np.zeros(6, dtype=np.int64), groups, None, 1, Key(0))
    assert [share.tolist() for share in shares] == [[1, 4], [0, 2, 5], [3]]


def test_small_groups_are_left_out_and_large_ones_cut() -> None:
    groups = np.array([7, 3, 7, 9, 3, 7])
    shares = by_group(minimum=2, limit=2)(np.zeros(6, dtype=np.int64), groups, None, 1, Key(0))
    assert shares[0].tolist() == [1, 4]
    assert len(shares[1]) == 2
    assert set(shares[1].tolist()) < {0, 2, 5}
    assert len(shares) == 2


def test_fewer_clients_than_groups_draws_groups_by_key() -> None:
    groups = np.repeat(np.arange(50), 3)
    drawn = [
        by_group()(np.zeros(150, dtype=np.int64), groups, 10, 1, Key(seed)) for seed in (0, 0, 1)
    ]
    chosen = [[int(groups[share[0]]) for share in shares] for shares in drawn]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(groups[share])) == 1 and len(share) == 3 for share in drawn[0])
    assert chosen[0] == sorted(set(chosen[0]))


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**32))
def test_spread_gives_every_group_equally_many_clients(kinds: int, more: int, seed: int) -> None:
    groups = np.sort(np.concatenate([np.arange(60) % kinds, np.arange(kinds)]))
    clients = kinds + more
    shares = by_group(spread=True)(
        np.zeros(len(groups), dtype=np.int64), groups, clients, 1, Key(seed)
    )
    owners = [set(groups[share].tolist()) for share in shares]
    assert len(shares) == clients
    assert all(len(owner) == 1 for owner in owners)
    per_group = np.bincount([owner.pop() for owner in owners], minlength=kinds)
    assert per_group.max() - per_group.min() <= 1
    assert len(np.unique(np.concatenate(shares))) == len(groups)


def test_spread_gives_the_clients_left_over_to_larger_groups() -> None:
    groups = np.repeat([0, 1, 2], [2, 10, 4])
    shares = by_group(spread=True)(np.zeros(16, dtype=np.int64), groups, 5, 1, Key(0))
    assert [(int(groups[share[0]]), len(share)) for share in shares] == [
        (0, 2),
        (1, 5),
        (1, 5),
        (2, 2),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("options", "groups", "clients", "complaint"),
    [
        ({}, None, 2, "needs data with writers"),
        ({}, [0, 0, 1, 1], 3, r"2 groups .* for 3 clients.*spread=true"),
        ({"minimum": 3}, [0, 0, 1, 1], None, "no group with 3 examples"),
        (
            {"minimum": 2, "spread": True},
            [0, 0, 1, 1],
            3,
            "cannot cut group 0 with 2 examples into 2 clients of 2",
        ),
        ({"spread": True}, [0, 0, 1, 1], 5, "cannot divide 4 training examples over 5 clients"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    options: dict[str, object], groups: list[int] | None, clients: int | None, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        by_group(**options)(
            np.zeros(4, dtype=np.int64),
            None if groups is None else np.array(groups),
            clients,
            1,
            Key(0),
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"minimum": 0}, {"limit": -1}, {"minimum": 5, "limit": 3}])
def test_group_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="by_group"):
        by_group(**options)  # type: ignore[arg-type]
