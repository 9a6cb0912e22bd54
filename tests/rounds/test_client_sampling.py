"""Which clients a round samples, and how many."""

from __future__ import annotations

import math

import numpy as np
import pytest

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.rounds.client_sampling import oversample, sample_clients
from remanence.testing.toy_task import small_experiment


def test_clients_that_join_by_coins() -> None:
    """Of 6 clients 3 are expected: over 400 rounds a client comes with chance 1/2, known to 4 /
    sqrt(1600), and pairs come together a quarter of the time.
    """
    experiment = small_experiment("fedavg", {"clients.sample": 3, "clients.sampling": "poisson"})
    everyone = np.ones(6, dtype=bool)
    came = np.array(
        [
            np.isin(
                np.arange(6), sample_clients(experiment, everyone, Key(0).fold_in("round", round))
            )
            for round in range(1, 401)
        ]
    )
    assert came.mean(axis=0) == pytest.approx(np.full(6, 0.5), abs=0.1)
    assert (came[:, 0] & came[:, 1]).mean() == pytest.approx(
        0.25, abs=4 * math.sqrt(0.25 * 0.75 / 400)
    )
    assert set(came.sum(axis=1)) >= {1, 2, 3, 4, 5}
    assert experiment.task.info.expected_cohort == 3.0
    assert small_experiment("fedavg", {"clients.sample": 3}).task.info.expected_cohort == 0.0


def test_coins_and_more_clients_than_needed_do_not_go_together() -> None:
    with pytest.raises(
        InputError, match=r"clients.sampling=poisson and round.over_selection cannot be combined"
    ):
        parse_experiment({}, {"clients.sampling": "poisson", "round.over_selection": 1.5})


def test_more_are_asked_than_wanted() -> None:
    assert [oversample(wanted, 1.3, 1000) for wanted in (1, 3, 10, 100)] == [2, 4, 13, 130]
    assert oversample(7, 1.0, 1000) == 7
    assert oversample(7, 2.0, 5) == 5


@pytest.mark.parametrize("factor", [0.9, math.inf])
def test_fewer_than_wanted_are_refused(factor: float) -> None:
    with pytest.raises(InputError, match=f"round.over_selection={factor} would sample fewer"):
        oversample(10, factor, 100)
