from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.data import drift_sampling, example_pools
from remanence.data.concept_views import number_views
from remanence.data.concepts import Concept
from remanence.data.dataset import DatasetSplit
from remanence.data.drift_sampling import DriftSamples, keep_partition, sample_examples
from remanence.data.drift_schedules import changed_clients, random

SWAP = (1, 0, 2, 3)
# each list: two clusters of four classes and two groups
WORLDS = {
    "label": [Concept(labels=(0, 1)), Concept(labels=(2, 3))],
    "overlap": [Concept(labels=(0, 1, 2)), Concept(labels=(1, 2, 3))],
    "swap": [Concept(), Concept(mapping=SWAP)],
    "label and swap": [Concept(labels=(0, 1, 2)), Concept(labels=(1, 2, 3), mapping=SWAP)],
    "domain": [Concept(domain=0), Concept(domain=1, rotation=90.0)],
    "quantity": [Concept(labels=(0, 1)), Concept(labels=(1, 2), size_factor=0.5)],
}


def make_split(each: int = 40) -> DatasetSplit:
    """`each` rows of four classes, every other row in group 1."""
    y = np.repeat(np.arange(4), each)
    return DatasetSplit(np.zeros((len(y), 1), np.float32), y, np.arange(len(y)) % 2)


def deal(
    world: str,
    samples: int = 6,
    validation: float = 2,
    resample: str = "everyone",
    seed: int = 0,
    each: int = 40,
    steps: int = 4,
) -> DriftSamples:
    split = make_split(each)
    assignment = random()(6, steps, Key(seed))
    return sample_examples(
        assignment,
        WORLDS[world],
        split,
        np.arange(len(split)),
        samples,
        validation,
        resample,
        Key(seed),
    )


def flatten(steps: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([ids for step in steps for ids in step])


worlds = st.sampled_from(sorted(WORLDS))
renewals = st.sampled_from(drift_sampling.RESAMPLE)


@given(worlds, renewals, st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_no_validation_row_is_ever_trained_on_by_anyone_in_any_view(
    world: str, resample: str, samples: int, validation: int, seed: int
) -> None:
    """160 examples, and far more draws: pools are reshuffled many times."""
    result = deal(world, samples, validation, resample, seed, steps=8)
    assert not np.intersect1d(flatten(result.train) % 160, flatten(result.valid) % 160).size


@given(worlds, renewals, st.integers(1, 9), st.integers(0, 4), st.integers(0, 99))
def test_every_client_has_its_number_of_rows_of_its_concept(
    world: str, resample: str, samples: int, validation: int, seed: int
) -> None:
    split, concepts = make_split(), WORLDS[world]
    result = deal(world, samples, validation, resample, seed)
    views = number_views(concepts)
    for step, clusters in enumerate(random()(6, 4, Key(seed)).tolist()):
        for client, cluster in enumerate(clusters):
            share = concepts[cluster].size_factor
            for held, wanted in ((result.train, samples), (result.valid, validation)):
                ids = held[step][client]
                assert ids.dtype == np.int64
                assert len(ids) == (max(1, int(share * wanted + 0.5)) if wanted else 0)
                assert (np.diff(ids) > 0).all()  # ascending, and none twice
                assert (ids // len(split) == views[cluster]).all()
                assert np.isin(ids % len(split), concepts[cluster].select(split)).all()


@given(st.integers(1, 14), st.integers(1, 60), st.integers(0, 99))
def test_a_pool_repeats_no_row_until_it_is_empty(count: int, draws: int, seed: int) -> None:
    """In a sequence of draws, every block of 14 that starts at a multiple of 14 holds each of the 14
    examples once; no draw repeats an example.
    """
    pool = example_pools.ExamplePool(np.arange(10, 24), Key(seed))
    rows = [pool.draw(count) for _ in range(draws)]
    assert all(len(np.unique(part)) == count for part in rows)
    seen: Counter[int] = Counter()
    for part in rows:
        seen.update(part.tolist())
        most, dealt = max(seen.values()), sum(seen.values())
        assert most == -(-dealt // 14)  # as few as can be ...
        # ... and none left out
        assert dealt < 14 or min(seen[row] for row in range(10, 24)) == dealt // 14


def test_rows_are_not_reused_while_there_are_enough() -> None:
    """6 clients over 4 steps draw 24 times; two clusters of 80 rows, 12 draws each of 5 + 1: 72
    rows.
    """
    result = deal("label", samples=5, validation=1)
    for held in (result.train, result.valid):
        ids = flatten(held)
        assert len(np.unique(ids)) == len(ids)
    assert result.reused == []


def test_reuse_is_reported() -> None:
    """80 rows a cluster at 3 : 1 are 60 for training and 20 for validation; 12 draws of 15 and
    5 need 180 and 60, three times all of them.
    """
    result = deal("label", samples=15, validation=5)
    assert len(result.reused) == 4
    assert (
        result.reused[0]
        == "cluster 0: 60 training examples were drawn 3.0 times on average, reshuffled each time"
    )
    assert Counter(Counter(flatten(result.train).tolist()).values()) == {3: 120}


def test_concepts_with_the_same_rows_share_one_pool() -> None:
    """160 rows in both views: 24 draws of 5 + 1 are 144, so no row may appear twice, not even
    in another view.
    """
    result = deal("swap", samples=5, validation=1)
    rows = np.concatenate([flatten(result.train), flatten(result.valid)]) % 160
    assert len(np.unique(rows)) == len(rows) == 144
    assert deal("swap", samples=20).reused[0].startswith("clusters 0 and 1: ")


def test_the_same_rows_written_in_two_ways_are_one_pool() -> None:
    """All labels and no choice of labels select the same 160 rows."""
    concepts = [Concept(), Concept(labels=(0, 1, 2, 3), mapping=SWAP), Concept(labels=(0,))]
    selected, pool_of = example_pools.find_pools(concepts, make_split(), np.arange(160))
    assert pool_of == [0, 0, 1]
    assert [len(rows) for rows in selected] == [160, 40]


@given(worlds, st.integers(0, 99))
def test_who_does_not_move_keeps_the_very_same_rows(world: str, seed: int) -> None:
    result = deal(world, samples=3, validation=1, resample="changed", seed=seed)
    changed = changed_clients(random()(6, 4, Key(seed)))
    for step in range(1, 4):
        for client in range(6):
            same = np.array_equal(result.train[step][client], result.train[step - 1][client])
            same_valid = np.array_equal(result.valid[step][client], result.valid[step - 1][client])
            if not changed[step, client]:
                assert same
                assert same_valid
            elif world != "swap":
                assert not same


def test_everyone_gets_new_rows_each_step() -> None:
    result = deal("label", samples=5, validation=1)
    for step in range(1, 4):
        for client in range(6):
            assert not np.intersect1d(
                result.train[step][client], result.train[step - 1][client]
            ).size


@given(worlds, st.integers(0, 50))
def test_the_key_alone_decides(world: str, seed: int) -> None:
    first, again, other = deal(world, seed=seed), deal(world, seed=seed), deal(world, seed=seed + 1)
    assert flatten(first.train).tolist() == flatten(again.train).tolist()
    assert flatten(first.valid).tolist() == flatten(again.valid).tolist()
    assert flatten(first.train).tolist() != flatten(other.train).tolist()


def test_validation_is_stratified_by_label_within_each_pool() -> None:
    """The strata: overlap has class 0 in pool 0, classes 1 and 2 in both, 3 in
    pool 1; a quarter of 40 rows each is 10.
    """
    split = make_split()
    sides = example_pools.split_pools(
        split, [np.arange(120), np.arange(40, 160)], example_pools.SplitSizes(6, 2), Key(3)
    )
    for train, valid in sides:
        assert not np.intersect1d(train, valid).size
        assert (len(train), len(valid)) == (90, 30)
    assert np.bincount(split.y[sides[0][1]], minlength=4).tolist() == [10, 10, 10, 0]
    assert (
        np.intersect1d(sides[0][1], np.arange(40, 120)).tolist()
        == np.intersect1d(sides[1][1], np.arange(40, 120)).tolist()
    )


def test_only_the_rows_at_hand_are_dealt() -> None:
    split, rows = make_split(), np.arange(1, 160, 2)
    result = sample_examples(
        random()(6, 4, Key(0)), WORLDS["label"], split, rows, 3, 1, "everyone", Key(0)
    )
    assert (np.concatenate([flatten(result.train), flatten(result.valid)]) % 2 == 1).all()


@pytest.mark.parametrize(
    ("world", "validation", "sizes"),
    [
        ("label", 0, (6, 0)),  # 12 draws from 80 rows: 6 each, 72
        ("label", 2, (4, 2)),
        ("label", 0.5, (3, 3)),
        ("label", 0.1, (5, 1)),  # at least one: 5/9 would be rounded up to it, too
        ("swap", 0, (6, 0)),  # 24 draws from 160 rows
        ("domain", 1, (5, 1)),
        ("quantity", 0, (6, 0)),  # cluster 1 draws half, so cluster 0 is the tighter one
    ],
)
def test_zero_samples_take_all_that_can_be_had_without_reuse(
    world: str, validation: float, sizes: tuple[int, int]
) -> None:
    result = deal(world, samples=0, validation=validation)
    assert (
        tuple(
            max(len(ids) for step in held for ids in step) for held in (result.train, result.valid)
        )
        == sizes
    )
    assert result.reused == []


@settings(max_examples=30)
@given(
    worlds, renewals, st.sampled_from([0, 1, 2, 0.1, 0.4]), st.integers(0, 9), st.integers(40, 60)
)
def test_zero_samples_is_the_largest_size_without_reuse(
    world: str, resample: str, validation: float, seed: int, each: int
) -> None:
    result = deal(world, 0, validation, resample, seed, each)
    # cluster 0 has share 1 in every world, and clients from the start
    size = max(len(ids) for step in result.train for ids in step)
    assert result.reused == []
    assert deal(world, size, validation, resample, seed, each).reused == []
    assert deal(world, size + 1, validation, resample, seed, each).reused != []


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"24 draws of 1 sample and 6 .*there is room for 6 in each"
    ):
        deal("label", samples=0, validation=6)
    with pytest.raises(
        InputError,
        match=r"cluster 0 needs 70 training and 20 validation examples, but the cluster has 62 and"
        r" 18",
    ):
        deal("label", samples=70, validation=20)  # 80 x 2 / 9 = 17.8
    with pytest.raises(InputError, match="cannot draw -1 samples"):
        deal("label", samples=-1)
    with pytest.raises(InputError, match=r"drift\.resample cannot be 'none'"):
        deal("label", resample="none")


def test_a_cluster_without_clients_may_have_too_few_examples() -> None:
    concepts = [Concept(labels=(0,)), Concept(labels=(1,), size_factor=100.0)]
    result = sample_examples(
        np.zeros((2, 3), np.int64), concepts, make_split(), np.arange(160), 0, 0, "everyone", Key(0)
    )
    assert len(result.train[0][0]) == 6  # 40 rows for 6 draws


def test_kept_rows_change_their_view_alone() -> None:
    """n = 10; cluster 1 sees view 1, so its ids are 10 + row."""
    parts = [np.array([3, 1]), np.array([5])]
    result = keep_partition(
        np.array([[0, 1], [1, 1]]),
        WORLDS["swap"],
        parts,
        [np.array([2]), np.empty(0, np.int64)],
        10,
    )
    assert [[ids.tolist() for ids in step] for step in result.train] == [
        [[1, 3], [15]],
        [[11, 13], [15]],
    ]
    assert [[ids.tolist() for ids in step] for step in result.valid] == [[[2], []], [[12], []]]
    assert result.reused == []


@pytest.mark.parametrize(
    "concept", [Concept(labels=(1,)), Concept(domain=0), Concept(size_factor=0.5)]
)
def test_rows_cannot_be_kept_where_a_cluster_selects_its_own(concept: Concept) -> None:
    with pytest.raises(InputError, match=r"cluster 1 of the drift .* cannot keep their examples"):
        keep_partition(np.array([[0]]), [Concept(), concept], [np.array([0])], [np.array([1])], 10)


def test_a_concept_is_tested_on_all_its_rows_in_its_view() -> None:
    """3 rows a class: rows 0 .. 11, odd rows in group 1."""
    concepts = [
        Concept(labels=(0, 3)),
        Concept(mapping=SWAP, domain=1),
        Concept(domain=0, labels=(1,), rotation=180.0),
    ]
    ids = drift_sampling.concept_test_ids(concepts, make_split(3))
    assert [part.tolist() for part in ids] == [
        [0, 1, 2, 9, 10, 11],
        [12 + row for row in (1, 3, 5, 7, 9, 11)],
        [24 + 4],
    ]
