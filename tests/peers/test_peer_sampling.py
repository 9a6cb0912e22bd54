"""Drawing peers: every set comes as often as it should, and nobody comes who cannot be reached."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.rng import Key
from remanence.peers.peer_sampling import gumbel, sample_uniform, sample_weighted

DRAWS = 20_000


def others(count: int) -> torch.Tensor:
    return ~torch.eye(count, dtype=torch.bool)


def assert_as_often(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> None:
    """Pearson's chi-square: with d degrees of freedom its mean is d and its variance 2 d; six
    standard deviations above is never met by chance.
    """
    assert set(found) <= set(wanted)
    draws, freedom = sum(found.values()), len(wanted) - 1
    chi_square = sum(
        (found[outcome] - draws * p) ** 2 / (draws * p) for outcome, p in wanted.items()
    )
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom), (found, wanted)


def sequences(weights: list[float], count: int) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of draws without replacement, one after the other, in
    proportion to the weights of those left.
    """
    chances = {}
    for order in itertools.permutations(range(len(weights)), count):
        p, left = 1.0, sum(weights)
        for peer in order:
            p, left = p * weights[peer] / left, left - weights[peer]
        chances[order] = p
    return chances


def draw_often(
    scores: list[float], count: int, reachable: list[bool] | None = None
) -> Counter[tuple[int, ...]]:
    """One client that asks, many times over as the rows of one table, so that the draws of rows
    must be independent too.
    """
    table = torch.tensor(scores, dtype=torch.float64).expand(DRAWS, len(scores))
    there = torch.tensor(reachable or [True] * len(scores)).expand(DRAWS, len(scores))
    return Counter(tuple(row) for row in sample_weighted(table, there, count, Key(5)).tolist())


def test_sequences_by_hand() -> None:
    # weights 1, 2, 3: first 0 with 1/6, then 1 with 2/5; first 2 with 3/6, then 1 with 2/3
    chances = sequences([1, 2, 3], 2)
    assert chances[0, 1] == pytest.approx(1 / 6 * 2 / 5)
    assert chances[2, 1] == pytest.approx(1 / 2 * 2 / 3)
    assert sum(chances.values()) == pytest.approx(1)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [1.0, 1.0, 4.0, 0.5]])
def test_the_largest_of_gumbel_noise_is_sequential_weighted_sampling(
    weights: list[float], count: int
) -> None:
    """Not only the sets but also the order in which they come: exactly the chances of drawing
    one after the other.
    """
    found = draw_often([math.log(weight) for weight in weights], count)
    assert_as_often(found, sequences(weights, count))


def test_uniform_draws_make_all_sets_alike() -> None:
    """Two of the four others of client 0: six sets."""
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(1_500):
        found[tuple(sorted(sample_uniform(others(5), 2, Key(seed))[0].tolist()))] += 1
    assert_as_often(found, dict.fromkeys(itertools.combinations((1, 2, 3, 4), 2), 1 / 6))


def test_clients_draw_independently() -> None:
    """Clients 1 and 2 of three each ask one of the two others: all four pairs of answers alike."""
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(1_500):
        found[tuple(sample_uniform(others(3), 1, Key(seed))[1:, 0].tolist())] += 1
    assert_as_often(found, dict.fromkeys(itertools.product((0, 2), (0, 1)), 1 / 4))


def test_who_cannot_be_reached_is_not_drawn_and_changes_no_chances() -> None:
    found = draw_often([0.0, math.log(2), 50.0], 2, [True, True, False])
    # 0 before 1 with 1/3, 1 before 0 with 2/3, whatever 2 would have weighed
    assert_as_often(found, {(0, 1): 1 / 3, (1, 0): 2 / 3})
    found = draw_often([0.0, math.log(2), 50.0], 3, [True, True, False])
    assert set(found) == {(0, 1, -1), (1, 0, -1)}
    assert set(draw_often([0.0, 0.0], 2, [False, False])) == {(-1, -1)}


@given(st.integers(1, 7), st.integers(0, 9), st.integers(0, 2**32), st.data())
def test_different_reachable_peers_as_many_as_there_are(
    clients: int, count: int, seed: int, data: st.DataObject
) -> None:
    cells = data.draw(st.lists(st.booleans(), min_size=clients**2, max_size=clients**2))
    reachable = torch.tensor(cells).reshape(clients, clients) & others(clients)
    scores = torch.arange(clients**2, dtype=torch.float64).reshape(clients, clients)
    drawn = sample_weighted(scores, reachable, count, Key(seed))
    assert drawn.shape == (clients, min(count, clients))
    for client, row in enumerate(drawn.tolist()):
        real = [peer for peer in row if peer >= 0]
        assert len(set(real)) == len(real) == min(count, int(reachable[client].sum()))
        assert all(reachable[client, peer] for peer in real)
        assert row == real + [-1] * (len(row) - len(real))  # nobody comes last


def test_a_peer_of_probability_zero_is_not_drawn() -> None:
    """Two rows, each a sample of three clients: log(0) = -inf is never drawn."""
    scores = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]], dtype=torch.float64).log()
    for seed in range(20):
        drawn = sample_weighted(scores, torch.ones(2, 3, dtype=torch.bool), 3, Key(seed)).tolist()
        assert [sorted(row) for row in drawn] == [[-1, 0, 2], [-1, -1, 1]]


def test_huge_scores_overflow_nothing() -> None:
    """exp(600) is beyond float64: the two largest by far are drawn, in order."""
    table = torch.tensor([[0.0, 600.0, 10_000.0, -10_000.0]], dtype=torch.float64)
    assert sample_weighted(table, torch.ones(1, 4, dtype=torch.bool), 2, Key(0)).tolist() == [
        [2, 1]
    ]


def test_uniform_is_weighted_with_equal_scores() -> None:
    equal = torch.full((6, 6), 7.0, dtype=torch.float64)
    assert torch.equal(
        sample_uniform(others(6), 3, Key(2)), sample_weighted(equal - 7, others(6), 3, Key(2))
    )


def test_gumbel_noise_has_its_mean_and_no_ends() -> None:
    """The mean is Euler's constant, the deviation pi / sqrt(6): over 10^6 numbers the mean is
    within 5 * 1.28 / 1000 of it. No two are equal.
    """
    noise = gumbel(Key(3), torch.zeros(1000, 1000, dtype=torch.float64))
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.0065)
    assert float(noise.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert len(torch.unique(noise)) == 1_000_000
