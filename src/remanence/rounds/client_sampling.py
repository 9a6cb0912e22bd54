"""Samples the clients of a round: which are online, and which of these train."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.experiment.build import BuiltExperiment


def online_clients(experiment: BuiltExperiment, round: int, key: Key) -> np.ndarray:
    """Which clients are online in a round; `key` is the round's. -> [K] bool"""
    return experiment.availability(experiment.task.info.num_clients, round, key)


def sample_clients(
    experiment: BuiltExperiment, online: np.ndarray, key: Key, busy: Sequence[int] = ()
) -> np.ndarray:
    """Sample the clients of a round from those that are online and not busy.

    Their replies are weighted by numbers of examples, whatever the sampling, unless the method
    fills `client_weights` (`aggregators/mean.py`).

    Args:
        experiment: Its settings name the size of the sample, and whether clients are sampled
            without replacement or each independently (`clients.sampling=poisson`).
        online: [K] bool, as `online_clients` returns it for the round.
        key: The round's.
        busy: Clients whose replies of earlier rounds have not arrived yet.

    Returns:
        [k] clients, ascending.
    """
    config, clients = experiment.config, experiment.task.info.num_clients
    available = np.setdiff1d(np.flatnonzero(online), np.asarray(busy, dtype=np.int64))
    if config.clients.sampling == "poisson":
        # drawn for all clients: a client's draw does not depend on which others are available
        drawn = key.fold_in("cohort").uniform(clients)
        return np.asarray(available[drawn[available] < experiment.cohort_size / clients])
    count = oversample(experiment.cohort_size, float(config.round.over_selection), len(available))
    return np.asarray(available[key.fold_in("cohort").choice(len(available), count)])


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
