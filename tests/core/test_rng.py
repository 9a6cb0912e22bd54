from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from remanence.core import rng
from remanence.core.rng import Key

any_value = st.integers(-(2**63), 2**64 - 1)
any_part = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=12))


def unsigned(words: torch.Tensor) -> list[int]:
    """int64 tensors hold the bits of uint64 words."""
    return [int(word) % 2**64 for word in words.reshape(-1)]


def test_the_hash_is_splitmix64() -> None:
    """The first two outputs of SplitMix64 seeded with 1234567 are published with its reference
    code; the second starts one golden step on.
    """
    golden = 0x9E3779B97F4A7C15
    assert rng._hash(1234567) == 6457827717110365317
    assert rng._hash(1234567 + golden) == 3203168211198807973
    assert rng._hash(0) == 0xE220A8397B1DCDAF


def test_bits_follow_the_definition() -> None:
    """Word i below key k is hash(k xor hash(i)), so for k = hash(0) word 0 is hash(0), and for
    k = 0 word 0 is hash(hash(0)).
    """
    zero = rng._hash(0)
    assert Key(zero).bits(1).tolist() == [zero]
    assert Key(0).bits(1).tolist() == [rng._hash(zero)]


@given(any_value, st.lists(any_part, max_size=5), st.data())
def test_folding_along_a_path_is_folding_step_by_step(
    value: int, path: list[int | str], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(path)))
    assert Key(value).fold_in(*path).fold_in() == Key(value).fold_in(*path[:cut]).fold_in(
        *path[cut:]
    )


@given(any_value, any_part)
def test_tensors_fold_to_the_same_bits(value: int, part: int | str) -> None:
    key, expected = Key(value), Key(value).fold_in(part)
    assert unsigned(rng.fold_in(key.tensor(), part)) == [expected.value]
    if isinstance(part, int):
        assert unsigned(rng.fold_in(key.tensor(), torch.tensor(part))) == [expected.value]


def test_a_tensor_of_parts_folds_each_of_them() -> None:
    parts = torch.tensor([[0, 1, 2], [7, 8, -9]])
    expected = [Key(5).fold_in(int(part)).value for part in parts.reshape(-1)]
    folded = rng.fold_in(Key(5).tensor(), parts)
    assert folded.shape == parts.shape
    assert unsigned(folded) == expected


def test_names_numbers_and_order_matter() -> None:
    paths = [(1,), ("1",), (1, 2), (2, 1), ("a", "b"), ("ab",), ("b", "a"), (-1,), ()]
    assert len({Key(3).fold_in(*path).value for path in paths}) == len(paths)
    assert Key(3).fold_in(1) != Key(4).fold_in(1)


@given(any_value, st.integers(0, 40))
def test_host_and_device_give_the_same_bits_and_numbers(value: int, count: int) -> None:
    key = Key(value)
    assert key.bits(count).tolist() == unsigned(rng.bits(key.tensor(), (count,)))
    assert (
        key.uniform(count).tolist() == rng.uniform(key.tensor(), (count,), torch.float64).tolist()
    )


def test_bits_of_a_shape_are_those_of_its_length() -> None:
    key = Key(11).tensor()
    assert torch.equal(rng.bits(key, (2, 3)).reshape(-1), rng.bits(key, (6,)))
    assert torch.equal(rng.bits(key, (6,))[:4], rng.bits(key, (4,)))
    assert rng.bits(key, ()).shape == ()


def test_uniform_is_the_same_in_every_precision_and_never_one() -> None:
    key = Key(1).tensor()
    single, double = rng.uniform(key, (10_000,)), rng.uniform(key, (10_000,), torch.float64)
    assert single.dtype == torch.float32
    assert torch.equal(single.double(), double)
    assert double.min() >= 0
    assert double.max() < 1
    assert torch.equal(double * 2**24, (double * 2**24).round())
    # all bits set is the largest draw, 1 - 2**-24
    assert rng._shift(torch.tensor(-1), 40) == 2**24 - 1


def test_uniform_numbers_look_uniform() -> None:
    """Of 100 000 draws a tenth falls into each tenth: binomial, deviation sqrt(100000 * .1 *
    .9) = 95; five of them are 475.
    """
    counts, _ = np.histogram(Key(2).uniform(100_000), bins=10, range=(0, 1))
    assert np.abs(counts - 10_000).max() < 475
    neighbors = np.corrcoef(
        [Key(i).uniform(1)[0] for i in range(2000)], [Key(i + 1).uniform(1)[0] for i in range(2000)]
    )
    assert abs(neighbors[0, 1]) < 5 / np.sqrt(2000)


def test_normal_numbers_look_normal() -> None:
    """The mean of n draws deviates by 1/sqrt(n), their variance by sqrt(2/n), their fourth
    moment (3) by sqrt(96/n).
    """
    n = 100_000
    draws = rng.normal(Key(3).tensor(), (n,), torch.float64)
    assert abs(float(draws.mean())) < 5 / n**0.5
    assert abs(float(draws.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((draws**4).mean()) - 3) < 5 * (96 / n) ** 0.5
    assert rng.normal(Key(3).tensor(), (2, 5)).dtype == torch.float32


def test_normal_is_finite_at_the_ends_of_the_uniform_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for edge in (0.0, 1 - 2.0**-24):
        monkeypatch.setattr(
            rng,
            "uniform",
            lambda key, shape, dtype, edge=edge: torch.full(tuple(shape), edge, dtype=dtype),
        )
        assert bool(torch.isfinite(rng.normal(Key(0).tensor(), (3,))).all())


@given(any_value, st.integers(0, 60))
def test_a_permutation_holds_every_number_once(value: int, count: int) -> None:
    assert sorted(Key(value).permutation(count).tolist()) == list(range(count))


@given(any_value, st.integers(0, 40), st.integers(0, 5))
def test_a_permutation_on_the_device_is_that_of_the_host(value: int, count: int, rest: int) -> None:
    found = rng.permutation(Key(value).tensor(), count + rest, torch.tensor(count)).tolist()
    assert found[:count] == Key(value).permutation(count).tolist()
    assert sorted(found[count:]) == list(range(count, count + rest))


def test_every_order_is_equally_likely() -> None:
    """6 orders of 3; 6000 draws give 1000 each, deviation sqrt(6000 * 1/6 * 5/6) = 29."""
    orders = [tuple(Key(0).fold_in(i).permutation(3).tolist()) for i in range(6000)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts) < 5 * 29


@given(any_value, st.integers(0, 40), st.data())
def test_a_choice_is_ascending_and_without_repetition(
    value: int, count: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, count))
    chosen = Key(value).choice(count, size)
    assert len(chosen) == size
    assert (np.diff(chosen) > 0).all()
    assert set(chosen.tolist()) <= set(range(count))


def test_the_generator_is_a_function_of_the_key() -> None:
    first, again, other = (Key(seed).generator().gamma(0.1, size=5) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_generator_uses_every_bit_of_the_key() -> None:
    """A key from 2**63 on must not pass through float64, which has 53 bits: 2**63 and 2**63 + 1
    would then draw the same.
    """
    assert not np.array_equal(
        Key(2**63).generator().random(3), Key(2**63 + 1).generator().random(3)
    )
    # the same 64 bits
    assert np.array_equal(Key(-1).generator().random(3), Key(2**64 - 1).generator().random(3))


def test_drawing_leaves_the_global_generators_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Key(0).generator().random(3)
    Key(0).permutation(5)
    rng.normal(Key(0).tensor(), (3,))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_a_stack_of_keys_draws_what_each_would() -> None:
    stack = torch.stack([Key(seed).tensor() for seed in (0, 1, 2**63 + 5)])
    for draw in (
        lambda key: rng.bits(key, (2, 3)),
        lambda key: rng.uniform(key, (4,), torch.float64),
        lambda key: rng.normal(rng.fold_in(key, "noise"), (4,)),
        lambda key: rng.permutation(key, 7, key % 5 + 1),
    ):
        assert torch.equal(vmap(draw)(stack), torch.stack([draw(key) for key in stack]))
