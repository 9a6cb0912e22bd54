"""Held-out sets: a public set, the validation examples of a client, a test set. All draws are
functions of a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key, fold_in_batch, permutations
from remanence.data.population import ClientData, PartitionIndices

_DRAWN_AT_A_TIME = 1 << 20  # random words in memory


def draw_stratified(strata: np.ndarray, count: int, key: Key) -> np.ndarray:
    """Draw `count` positions of `strata` [n] so that every stratum gives its share.

    Shares are rounded by largest remainders, with ties broken at random.

    Returns:
        [count] positions, ascending.
    """
    _, member, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    shares, remainders = np.divmod(count * sizes, len(strata))  # integers: exact at any size
    ties = key.fold_in("ties").bits(len(sizes))
    first = np.lexsort((ties, -remainders))[: count - int(shares.sum())]
    shares[first] += 1
    # sorted by stratum, in random order within each
    order = np.lexsort((key.fold_in("rows").bits(len(strata)), member))
    starts = np.cumsum(sizes) - sizes
    rank = np.arange(len(strata)) - starts[member[order]]
    return np.sort(order[rank < shares[member[order]]])


def hold_out(
    indices: np.ndarray, labels: np.ndarray, count: int, key: Key
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a public set of `count` examples, stratified by class, before partitioning.

    Args:
        indices: examples of a split.
        labels: the labels of the whole split.
        count: the size of the public set.
        key: draws the public set.

    Returns:
        (public, rest), both ascending.

    >>> public, rest = hold_out(np.arange(8), np.array([0, 0, 0, 0, 0, 0, 1, 1]), 4, Key(0))
    >>> len(rest), (public >= 6).sum().item()
    (4, 1)
    """
    if count < 0 or (count and count >= len(indices)):
        raise InputError(
            f"a public set of {count} examples cannot be taken from {len(indices)} training"
            f" examples: ask for 0 to {max(0, len(indices) - 1)}"
        )
    indices = np.sort(indices)
    if not count:
        return indices[:0], indices
    public = np.zeros(len(indices), dtype=bool)
    public[draw_stratified(labels[indices], count, key)] = True
    return indices[public], indices[~public]


def validation_size(total: int, fraction: float) -> int:
    """The number of validation examples of a client with `total` examples: `fraction` of them,
    at least one if there are two or more, and at least one stays for training.

    >>> [validation_size(total, 0.1) for total in (1, 2, 14, 26)]
    [0, 1, 1, 3]
    """
    if not 0 <= fraction < 1:
        raise InputError(
            f"a validation fraction of {fraction} leaves nothing to train on or is"
            " negative: give a number from 0 up to but not including 1"
        )
    if not fraction or total < 2:
        return 0
    return min(total - 1, max(1, round(fraction * total)))


def split_train_valid(parts: Sequence[np.ndarray], validation: float, key: Key) -> ClientData:
    """Return the data of clients that do not drift: each client's part of a partition, split at
    random into training and validation examples.

    Args:
        parts: the examples of each client, as a partition returns them.
        validation: the fraction of each client's examples that become validation examples
            (`validation_size`).
        key: draws the split; each client's draw depends on its number only.
    """
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise InputError(
            f"client {empty[0]} has no data ({len(empty)} of {len(parts)} clients): use fewer"
            " clients or a milder partition"
        )
    everything = PartitionIndices.concat(parts)
    keys = fold_in_batch(key.fold_in("validation"), np.arange(len(parts)))
    held = _draw_validation(everything.offsets, validation, keys)
    train, valid = (everything.select(chosen) for chosen in (~held, held))
    return ClientData(train, valid, cluster=np.zeros(len(parts), dtype=np.int64))


def _draw_validation(offsets: np.ndarray, fraction: float, keys: np.ndarray) -> np.ndarray:
    """Which of all examples become validation examples: clients of equal size are drawn at once.

    Args:
        offsets: [K + 1] where the examples of each client begin.
        fraction: of each client's examples.
        keys: [K] uint64, a key of each client.

    Returns:
        [n] bool
    """
    sizes = np.diff(offsets)
    held = np.zeros(offsets[-1], dtype=bool)
    for total in np.unique(sizes).tolist():
        count = validation_size(total, fraction)
        clients = np.flatnonzero(sizes == total)
        step = max(1, _DRAWN_AT_A_TIME // total)
        for some in np.split(clients, range(step, len(clients), step)) if count else ():
            drawn = permutations(keys[some], total)[:, :count]
            held[offsets[some, None] + drawn] = True
    return held
