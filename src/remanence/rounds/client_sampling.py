"""Samples the clients of a round: which are online, and which of these train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.experiment.build import BuiltExperiment

# Up to this number of clients, the sample is the beginning of a random order of all of them, which
# takes a millisecond or two; with more, that order would take a noticeable part of a round.
MANY_CLIENTS = 1 << 16


def online_clients(
    experiment: BuiltExperiment, clients: np.ndarray, round: int, key: Key
) -> np.ndarray:
    """Which of these clients are online in a round; `key` is the round's. -> [k] bool"""
    return experiment.availability(clients, experiment.task.info.num_clients, round, key)


def sample_clients(
    experiment: BuiltExperiment, round: int, key: Key, busy: Sequence[int] = ()
) -> np.ndarray:
    """Sample the clients of a round from those that are online and not busy.

    Their replies are weighted by numbers of examples, whatever the sampling, unless the method
    fills `client_weights` (`aggregators/mean.py`).

    Args:
        experiment: Its settings name the size of the sample, and whether clients are sampled
            without replacement or each independently (`clients.sampling=poisson`).
        round: Of the run.
        key: The round's.
        busy: Clients whose replies of earlier rounds have not arrived yet.

    Returns:
        [k] clients, ascending.
    """
    config, clients = experiment.config, experiment.task.info.num_clients
    wanted, draw = experiment.cohort_size, key.fold_in("cohort")

    def available(some: np.ndarray) -> np.ndarray:
        free = np.isin(some, busy, invert=True) if busy else np.ones(len(some), dtype=bool)
        return np.asarray(some[free & online_clients(experiment, some, round, key)])

    if config.clients.sampling == "poisson":
        # a client's draw does not depend on which others are available
        return available(np.flatnonzero(draw.uniform(clients) < wanted / clients))
    over_selection = float(config.round.over_selection)
    if clients > MANY_CLIENTS:
        few = _sample_from_many(
            clients, oversample(wanted, over_selection, clients), draw, available
        )
        if few is not None:
            return few
    found = available(np.arange(clients))
    count = oversample(wanted, over_selection, len(found))
    return np.asarray(found[draw.choice(len(found), count)])


def _sample_from_many(
    clients: int, count: int, draw: Key, available: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray | None:
    """Draw numbers of clients with replacement until `count` different ones are available: a
    sample without replacement that costs nothing for the clients that are not drawn.

    Returns:
        [count], ascending; None where fewer are found among as many draws as clients.
    """
    draws = 2 * count
    while draws < clients:
        numbers, first = np.unique(draw.bits(draws) % np.uint64(clients), return_index=True)
        found = available(numbers[np.argsort(first)].astype(np.int64))
        if len(found) >= count:
            return np.sort(found[:count])
        draws *= 2
    return None


def oversample(wanted: int, over_selection: float, available: int) -> int:
    """The number of clients to sample where `wanted` replies are used: a share more, rounded up,
    and at most those that are available.

    >>> oversample(10, 1.3, available=100), oversample(10, 1.1, available=100)
    (13, 11)
    >>> oversample(10, 1.3, available=12)
    12
    """
    if over_selection < 1 or not math.isfinite(over_selection):
        raise InputError(
            f"round.over_selection={over_selection} would sample fewer clients than are wanted:"
            " give 1 or more, such as 1.3"
        )
    # in floating point 10 * 1.1 is slightly above 11
    return min(available, math.ceil(wanted * over_selection - 1e-9))
