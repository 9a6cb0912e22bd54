from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import PARTITIONS
from remanence.data.partitions import (
    Partition,
    _log_dirichlet,
    dirichlet,
    dirichlet_by_class,
    draw_by_counts,
    iid,
    indices_by_client,
    quantity,
    shards,
)

labels_of_some_size = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(
    lambda values: np.array(values, dtype=np.int64)
)
alphas = st.sampled_from([1e-3, 0.1, 1.0, 1e3])
seeds = st.integers(0, 2**32)


def assert_sound(shares: list[np.ndarray], rows: int) -> np.ndarray:
    """Ascending, disjoint, in range: what every partition promises. Gives all rows that were
    shared out.
    """
    for share in shares:
        assert share.dtype == np.int64
        assert (np.diff(share) > 0).all()
    together = np.concatenate(shares)
    assert len(np.unique(together)) == len(together)
    assert together.min(initial=0) >= 0
    assert together.max(initial=0) < rows
    return together


@given(labels_of_some_size, seeds, st.data())
def test_iid_shares_out_everything_in_sizes_that_differ_by_one(
    labels: np.ndarray, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    shares = iid()(labels, None, clients, 5, Key(seed))
    assert len(assert_sound(shares, len(labels))) == len(labels)
    sizes = [len(share) for share in shares]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1


@given(labels_of_some_size, alphas, seeds, st.data())
def test_dirichlet_gives_everyone_exactly_the_same_number(
    labels: np.ndarray, alpha: float, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    samples = data.draw(st.integers(0, len(labels) // clients))
    shares = dirichlet(alpha=alpha, samples=samples)(labels, None, clients, 5, Key(seed))
    assert_sound(shares, len(labels))
    assert [len(share) for share in shares] == [samples or len(labels) // clients] * clients


@given(labels_of_some_size, alphas, seeds, st.data())
def test_dirichlet_by_class_loses_no_row_and_keeps_the_minimum(
    labels: np.ndarray, alpha: float, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(0, len(labels) // clients))
    shares = dirichlet_by_class(alpha=alpha, minimum=minimum)(labels, None, clients, 5, Key(seed))
    assert len(assert_sound(shares, len(labels))) == len(labels)
    assert len(shares) == clients
    assert min(len(share) for share in shares) >= minimum


@given(labels_of_some_size, seeds, st.data())
def test_shards_share_out_everything(labels: np.ndarray, seed: int, data: st.DataObject) -> None:
    per_client = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // per_client))
    shares = shards(per_client=per_client)(labels, None, clients, 5, Key(seed))
    assert len(assert_sound(shares, len(labels))) == len(labels)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= per_client  # each shard may have one row more


@given(
    labels_of_some_size,
    st.sampled_from([0.0, 1.5, 50.0]),
    st.sampled_from([0.0, 1.0, 30.0]),
    seeds,
    st.data(),
)
def test_quantity_shares_out_everything_and_keeps_the_minimum(
    labels: np.ndarray, power: float, sigma: float, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(0, len(labels) // clients))
    shares = quantity(power=power, sigma=sigma, minimum=minimum)(
        labels, None, clients, 5, Key(seed)
    )
    assert len(assert_sound(shares, len(labels))) == len(labels)
    assert min(len(share) for share in shares) >= minimum


EVERY = {
    "iid": iid(),
    "dirichlet": dirichlet(),
    "dirichlet_by_class": dirichlet_by_class(minimum=1),
    "shards": shards(per_client=1),
    "quantity": quantity(),
}


@pytest.mark.parametrize("name", EVERY)
def test_as_many_clients_as_rows_leaves_one_row_each(name: str) -> None:
    shares = EVERY[name](np.array([0, 0, 0, 2, 2, 3]), None, 6, 4, Key(1))  # class 1 is missing
    assert [len(share) for share in shares] == [1] * 6
    assert len(assert_sound(shares, 6)) == 6


@pytest.mark.parametrize("name", EVERY)
def test_the_key_alone_decides(name: str) -> None:
    labels = np.arange(200) % 5
    first, again, other = (EVERY[name](labels, None, 10, 5, Key(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("clients", [0, 7, None])
def test_impossible_numbers_of_clients_are_refused(name: str, clients: int | None) -> None:
    with pytest.raises(InputError, match=rf"partition '{name}' .*clients"):
        EVERY[name](np.zeros(6, dtype=np.int64), None, clients, 2, Key(0))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: dirichlet(alpha=0.0), "alpha=0.0"),
        (lambda: dirichlet(alpha=float("nan")), "alpha=nan"),
        (lambda: dirichlet(alpha=float("inf")), "alpha=inf"),
        (lambda: dirichlet(samples=-1), "-1 samples"),
        (lambda: dirichlet_by_class(alpha=-1.0), "alpha=-1.0"),
        (lambda: dirichlet_by_class(minimum=-1), "-1 examples"),
        (lambda: shards(per_client=0), "0 shards"),
        (lambda: quantity(power=-1.0), "power=-1.0"),
        (lambda: quantity(sigma=float("nan")), "sigma=nan"),
    ],
)
def test_impossible_options_are_refused_when_the_partition_is_made(
    make: object, complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("partition", "complaint"),
    [
        (dirichlet(samples=4), "3 clients 4 samples each out of 10"),
        (dirichlet_by_class(minimum=4), "4 of 10 examples to each of 3"),
        (shards(per_client=4), "10 examples into 3 x 4 shards"),
        (quantity(minimum=4), "4 of 10 examples to each of 3"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(partition: Partition, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        partition(np.zeros(10, dtype=np.int64), None, 3, 2, Key(0))


def test_deal_hands_out_the_counts_it_was_given() -> None:
    labels = np.array([0, 1, 0, 1, 0, 1, 1])
    # classes 0 and 1 of two clients; two rows of class 1 are left over
    counts = np.array([[1, 2], [2, 0]])
    shares = draw_by_counts(labels, counts, Key(5))
    assert_sound(shares, 7)
    assert [np.bincount(labels[share], minlength=2).tolist() for share in shares] == counts.tolist()


def test_gather_skips_rows_that_nobody_owns() -> None:
    shares = indices_by_client(np.array([1, -1, 0, 1, -1]), 3)
    assert [share.tolist() for share in shares] == [[2], [0, 3], []]


def test_small_alpha_gives_single_classes_and_large_alpha_the_common_mix() -> None:
    """10 clients x 100 rows of 2 balanced classes. At alpha 1e-3 a client's larger class has share
    1 with probability near 1; a client whose class has run out may be mixed, hence the median. At
    alpha 1e3 the share has deviation sqrt(.25/2001) = .011, and drawing adds sqrt(.25/100) = .05.
    """
    labels = np.arange(1000) % 2
    small = [labels[share].mean() for share in dirichlet(alpha=1e-3)(labels, None, 10, 2, Key(0))]
    large = [labels[share].mean() for share in dirichlet(alpha=1e3)(labels, None, 10, 2, Key(0))]
    assert np.median(np.abs(np.array(small) - 0.5)) == 0.5
    assert np.abs(np.array(large) - 0.5).max() < 0.25


def test_dirichlet_mixes_have_the_variance_of_the_distribution() -> None:
    """A share of Dirichlet(a, a) is Beta(a, a) with variance 1 / (4 (2a + 1)) = 1/12 at a = 1. 400
    clients draw 50 of 200,000 rows, so that no class runs out; multinomial noise adds E[p(1-p)]/50
    = (1/6)/50. A variance of 400 draws is good to about 7 %.
    """
    labels = np.arange(200_000) % 2
    shares = dirichlet(alpha=1.0, samples=50)(labels, None, 400, 2, Key(2))
    means = np.array([labels[share].mean() for share in shares])
    assert np.var(means) == pytest.approx(1 / 12 + 1 / 300, rel=0.2)


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, 1 / 5), (1.0, 1 / 6), (0.01, 1.01 / 3.09)])
def test_mixes_have_the_second_moment_of_the_distribution(alpha: float, expected: float) -> None:
    """E[p^2] = (a + 1) / (C (C a + 1)) for Dirichlet(a) over C = 3: 1.5/7.5, 2/12, 1.01/3.09. The
    mean of 200,000 draws has a deviation below .5 / sqrt(200,000) = .0011.
    """
    logs = _log_dirichlet(Key(9).generator(), alpha, (200_000, 3))
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    assert np.mean(shares**2) == pytest.approx(expected, abs=0.004)


def test_the_papers_partition_is_100_clients_of_500() -> None:
    labels = np.repeat(np.arange(10), 5000)
    shares = dirichlet(alpha=0.1)(labels, None, 100, 10, Key(0))
    assert [len(share) for share in shares] == [500] * 100
    assert len(assert_sound(shares, 50_000)) == 50_000
    largest = [np.bincount(labels[share]).max() for share in shares]
    # the mean largest share of Dirichlet(.1) over 10 classes is about .66
    assert np.median(largest) > 250


def test_clients_drawing_last_are_not_always_the_same() -> None:
    """When pools run low the last to draw get what is left; which client that is must not depend on
    its number. One class of two is
    rare: the clients that draw early get it.
    """
    labels = np.array([0] * 90 + [1] * 10)
    first_half = 0
    for seed in range(20):
        shares = dirichlet(alpha=0.05)(labels, None, 10, 2, Key(seed))
        first_half += sum(int(labels[share].sum()) for share in shares[:5])
    # of 200 rare rows; all would be 200 or 0 if order were fixed and early clients always took them
    assert 40 < first_half < 160


def test_shards_give_at_most_as_many_labels_as_shards() -> None:
    labels = np.repeat(np.arange(10), 60)  # 20 shards of 30 rows lie inside one label each
    for share in shards(per_client=2)(labels, None, 10, 10, Key(0)):
        assert len(share) == 60
        assert len(np.unique(labels[share])) <= 2


def test_quantity_keeps_the_label_mix_and_follows_the_power_law() -> None:
    """1200 rows, mix 3:2:1, 3 clients, minimum 0, power 1: shares 1 : 1/2 : 1/3 of 11/6, so
    654.5, 327.3, 218.2 rows.
    """
    labels = np.repeat([0, 1, 2], [600, 400, 200])
    shares = quantity(power=1.0, minimum=0)(labels, None, 3, 3, Key(7))
    assert sorted(len(share) for share in shares) == [218, 327, 655]
    for share in shares:
        expected = len(share) * np.array([3, 2, 1]) / 6
        assert np.abs(np.bincount(labels[share], minlength=3) - expected).max() <= 2


def test_quantity_does_not_tie_labels_to_client_numbers() -> None:
    labels = np.arange(10)
    orders = {
        tuple(
            int(labels[share[0]]) for share in quantity(power=0.0)(labels, None, 10, 10, Key(seed))
        )
        for seed in range(5)
    }
    assert len(orders) == 5


def test_quantity_with_sigma_draws_other_sizes_than_the_power_law() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    sizes = sorted(len(share) for share in quantity(sigma=1.0)(labels, None, 10, 1, Key(0)))
    assert sizes != sorted(len(share) for share in quantity()(labels, None, 10, 1, Key(0)))
    assert sizes[-1] > 2 * sizes[0]


def test_filling_up_takes_from_the_largest_only() -> None:
    """One client holds nearly everything at alpha 1e-3; with a minimum the others have exactly
    that or their own larger share.
    """
    labels = np.zeros(100, dtype=np.int64)
    bare = dirichlet_by_class(alpha=1e-3, minimum=0)(labels, None, 10, 1, Key(0))
    filled = dirichlet_by_class(alpha=1e-3, minimum=3)(labels, None, 10, 1, Key(0))
    rich = int(np.argmax([len(share) for share in bare]))
    assert len(bare[rich]) == 100
    assert [len(share) for share in filled] == [73 if client == rich else 3 for client in range(10)]


def test_the_table_lists_every_partition_under_its_own_name() -> None:
    assert {name: make.__name__ for name, make in PARTITIONS.items()} == {
        name: name for name in PARTITIONS
    }
    assert set(PARTITIONS) == {*EVERY, "label_clusters", "by_group"}


def take_turns(labels: np.ndarray, alpha: float, clients: int, seed: int) -> np.ndarray:
    """Acar et al. 2021: a random client that is not full draws one example, by its own label mix
    over the classes that are left. -> [clients, C] counts
    """
    draw, pool = np.random.default_rng(seed), np.bincount(labels)
    mixes = draw.dirichlet([alpha] * len(pool), clients)
    counts = np.zeros((clients, len(pool)), dtype=np.int64)
    size = len(labels) // clients
    while (waiting := np.flatnonzero(counts.sum(axis=1) < size)).size:
        client = draw.choice(waiting)
        mix = mixes[client] * (pool > 0) + 1e-12 * (pool > 0)
        label = draw.choice(len(pool), p=mix / mix.sum())
        counts[client, label] += 1
        pool[label] -= 1
    return counts


def test_clients_that_take_turns_are_less_skewed() -> None:
    """As the documentation of `dirichlet` says: the share of a client's largest class, three
    seeds.
    """
    labels = np.repeat(np.arange(10), 200)
    largest = {"ours": 0.0, "turns": 0.0}
    for seed in range(3):
        parts = dirichlet(alpha=0.1)(labels, None, 20, 10, Key(seed))
        ours = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        for name, counts in (("ours", ours), ("turns", take_turns(labels, 0.1, 20, seed))):
            largest[name] += float((counts.max(axis=1) / counts.sum(axis=1)).mean()) / 3
    assert largest["ours"] > largest["turns"] + 0.05


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_says_which_scheme_it_is(name: str) -> None:
    words = " ".join((PARTITIONS[name].__doc__ or "").split())
    assert re.search(r"\(.* et al\. 20\d\d|No published scheme", words)
