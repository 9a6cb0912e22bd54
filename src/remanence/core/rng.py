"""Random numbers as a function of keys: the same key always gives the same numbers.

Nothing here has state, so there is nothing to save: a run resumes exactly, and a client draws the
same numbers on every engine, in any order of clients and in any stack. `Key` works on the host with
Python integers; the functions below it work on int64 tensors, also inside `torch.vmap`, and give
the same bits. The hash is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_LARGEST = (1 << 63) - 1  # int64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_GOLDEN_WORD, _MIX1_WORD, _MIX2_WORD = np.uint64(_GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no arithmetic on uint64."""
    return value - (1 << 64) if value >> 63 else value


def _hash(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def _number(part: int | str) -> int:
    return _number_of_word(part) if isinstance(part, str) else int(part) & _MASK


@lru_cache(maxsize=1024)  # the same few words, in every round
def _number_of_word(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Key:
    """A random key, from which random numbers and other keys are computed.

    >>> Key(0).fold_in("round", 3) == Key(0).fold_in("round").fold_in(3)
    True
    >>> sorted(Key(7).permutation(5).tolist())
    [0, 1, 2, 3, 4]
    """

    value: int

    def fold_in(self, *parts: int | str) -> Key:
        """A key computed from this one and some numbers and words."""
        value = self.value & _MASK
        for part in parts:
            value = _hash(value ^ _hash(_number(part)))
        return Key(value)

    def bits(self, count: int | np.ndarray) -> np.ndarray:
        """`count` independent 64-bit words, the same as the tensor function `bits` gives; with an
        array of positions, the words at these alone.
        """
        positions = count if isinstance(count, np.ndarray) else np.arange(count)
        return _hash_array(np.uint64(self.value & _MASK) ^ _hash_array(positions.astype(np.uint64)))

    def permutation(self, count: int) -> np.ndarray:
        """A random order of 0 .. count-1."""
        # the hash is one to one, so no two words are equal: every way of sorting gives this order
        return np.argsort(self.bits(count))

    def choice(self, count: int, size: int) -> np.ndarray:
        """`size` different numbers below `count`, in ascending order."""
        return np.sort(self.permutation(count)[:size])

    def uniform(self, count: int | np.ndarray) -> np.ndarray:
        """`count` float64 numbers in [0, 1), multiples of 2**-24, exact in float32 too; with an
        array of positions, the numbers at these alone.
        """
        return (self.bits(count) >> np.uint64(40)).astype(np.float64) * 2.0**-24

    def generator(self) -> np.random.Generator:
        """A numpy generator for distributions that only numpy has (gamma, multinomial)."""
        return np.random.Generator(
            np.random.Philox(key=np.array([self.value & _MASK, 0], dtype=np.uint64))
        )

    def tensor(self) -> Tensor:
        """This key for use on a device: an int64 scalar."""
        return torch.tensor(_signed(self.value & _MASK), dtype=torch.int64)


def fold_in_batch(key: Key | np.ndarray, *parts: int | str | np.ndarray) -> np.ndarray:
    """`Key.fold_in` for many keys at once: from one key or an array of key values; each part may be
    an array. -> uint64 [n]

    >>> one_by_one = [Key(7).fold_in(number, "plan").value for number in range(3)]
    >>> fold_in_batch(Key(7), np.arange(3), "plan").tolist() == one_by_one
    True
    """
    values = np.array([key.value & _MASK], dtype=np.uint64) if isinstance(key, Key) else key
    for part in parts:
        if isinstance(part, np.ndarray):
            values = _hash_array(values ^ _hash_array(part.astype(np.uint64)))
        else:
            values = _hash_array(values ^ np.uint64(_hash(_number(part))))
    return values


def permutations(key_values: np.ndarray, count: int) -> np.ndarray:
    """`Key.permutation` for many keys at once. uint64 [n] -> [n, count]"""
    words = _hash_array(key_values[:, None] ^ _hash_array(np.arange(count, dtype=np.uint64)))
    return np.argsort(words, axis=1)


def _hash_array(values: np.ndarray) -> np.ndarray:
    """`_hash` for arrays: numpy warns when scalars overflow, but not when arrays do."""
    first, second, third = _SHIFTS
    mixed: np.ndarray = values + _GOLDEN_WORD
    mixed ^= mixed >> first
    mixed *= _MIX1_WORD
    mixed ^= mixed >> second
    mixed *= _MIX2_WORD
    mixed ^= mixed >> third
    return mixed


def _shift(values: Tensor, count: int) -> Tensor:
    """Logical right shift: torch shifts signed numbers arithmetically."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _hash_tensor(values: Tensor) -> Tensor:
    values = values + _signed(_GOLDEN)
    values = (values ^ _shift(values, 30)) * _signed(_MIX1)
    values = (values ^ _shift(values, 27)) * _signed(_MIX2)
    return values ^ _shift(values, 31)


def fold_in(key: Tensor, part: int | str | Tensor) -> Tensor:
    """`Key.fold_in` for tensors; `part` may be a tensor that broadcasts with the key."""
    if isinstance(part, Tensor):
        return _hash_tensor(key ^ _hash_tensor(part.to(torch.int64)))
    return _hash_tensor(key ^ _signed(_hash(_number(part))))


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Independent 64-bit words of a shape, drawn from a scalar key."""
    count = math.prod(shape)
    words = key ^ _hash_tensor(torch.arange(count, dtype=torch.int64, device=key.device))
    return _hash_tensor(words).reshape(tuple(shape))


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1), multiples of 2**-24: the same in every precision from float32 up."""
    return _shift(bits(key, shape), 40).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box and Muller)."""
    radius = uniform(fold_in(key, "radius"), shape, torch.float64)
    angle = uniform(fold_in(key, "angle"), shape, torch.float64)
    return (torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2.0 * math.pi * angle)).to(dtype)


def permutation(key: Tensor, length: int, count: Tensor) -> Tensor:
    """`Key.permutation(count)`, followed by the other numbers below `length` in any order."""
    # signed numbers have the order of unsigned ones once their first bit is flipped
    words = bits(key, (length,)) ^ _signed(1 << 63)
    place = torch.arange(length, device=key.device)
    return torch.argsort(torch.where(place < count, words, torch.full_like(words, _LARGEST)))
