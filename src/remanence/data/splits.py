"""Setting rows aside: a public set, validation rows of a client, a test set. All draws are
functions of a key.
"""

from __future__ import annotations

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key


def draw_stratified(strata: np.ndarray, count: int, key: Key) -> np.ndarray:
    """`count` positions of `strata` [n], every stratum giving its share (largest remainders,
    ties at random), in ascending order.
    """
    _, member, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    shares, remainders = np.divmod(count * sizes, len(strata))  # integers: exact at any size
    ties = key.fold_in("ties").bits(len(sizes))
    first = np.lexsort((ties, -remainders))[: count - int(shares.sum())]
    shares[first] += 1
    # stratum by stratum, random inside each
    order = np.lexsort((key.fold_in("rows").bits(len(strata)), member))
    starts = np.cumsum(sizes) - sizes
    rank = np.arange(len(strata)) - starts[member[order]]
    return np.sort(order[rank < shares[member[order]]])


def hold_out(
    rows: np.ndarray, labels: np.ndarray, count: int, key: Key
) -> tuple[np.ndarray, np.ndarray]:
    """Take a public set of `count` rows, stratified by class, out of `rows` before they are
    partitioned: (public, the rest).

    `labels` are those of the whole split; `rows` are row numbers in it.

    >>> public, rest = hold_out(np.arange(8), np.array([0, 0, 0, 0, 0, 0, 1, 1]), 4, Key(0))
    >>> len(rest), (public >= 6).sum().item()
    (4, 1)
    """
    if count < 0 or (count and count >= len(rows)):
        raise InputError(
            f"a public set of {count} examples cannot be taken from {len(rows)} training"
            f" examples: ask for 0 to {max(0, len(rows) - 1)}"
        )
    rows = np.sort(rows)
    if not count:
        return rows[:0], rows
    public = np.zeros(len(rows), dtype=bool)
    public[draw_stratified(labels[rows], count, key)] = True
    return rows[public], rows[~public]


def split_validation(
    rows: np.ndarray, labels: np.ndarray, fraction: float, key: Key, *, stratify: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Split one client's rows at random into (training rows, validation rows), both ascending.

    `round(fraction * n)` rows go to validation, at least one where the client has two rows or more,
    and at least one stays for training. With `stratify` every class gives its share; `labels` are
    those of the whole split.

    >>> [len(part) for part in split_validation(np.arange(500), np.zeros(500, int), 0.1, Key(0))]
    [450, 50]
    """
    if not 0 <= fraction < 1:
        raise InputError(
            f"a validation fraction of {fraction} leaves nothing to train on or is"
            " negative: give a number from 0 up to but not including 1"
        )
    rows = np.sort(rows)
    if not fraction or len(rows) < 2:
        return rows, rows[:0]
    count = min(len(rows) - 1, max(1, round(fraction * len(rows))))
    valid = np.zeros(len(rows), dtype=bool)
    valid[
        draw_stratified(labels[rows], count, key) if stratify else key.choice(len(rows), count)
    ] = True
    return rows[~valid], rows[valid]
