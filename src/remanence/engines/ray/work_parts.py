"""How the work of a round is divided among workers."""

from __future__ import annotations

import numpy as np


def balance(work: np.ndarray, workers: int) -> list[np.ndarray]:
    """Indices 0 .. n-1 in at most `workers` parts of about equal work, the largest part first.

    Items are assigned from the largest to the smallest, each to the part with the least work.

    >>> [places.tolist() for places in balance(np.array([1, 5, 2, 2, 1]), 2)]
    [[1, 4], [0, 2, 3]]
    """
    slices: list[list[int]] = [[] for _ in range(max(1, min(workers, len(work))))]
    loads = np.zeros(len(slices))
    for place in np.argsort(-work, kind="stable").tolist():
        least = int(np.argmin(loads))
        slices[least].append(place)
        loads[least] += max(int(work[place]), 1)  # an item without work still takes time
    return [
        np.sort(np.array(slices[number], dtype=np.int64))
        for number in np.argsort(-loads, kind="stable")
        if slices[number]
    ]
