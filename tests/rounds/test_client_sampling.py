"""Which clients a round samples, and how many."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.client_sampling import MANY_CLIENTS, oversample, sample_clients
from remanence.testing.toy_task import small_experiment


def test_clients_that_join_by_coins() -> None:
    """Of 6 clients 3 are expected: over 400 rounds a client comes with chance 1/2, known to 4 /
    sqrt(1600), and pairs come together a quarter of the time.
    """
    experiment = small_experiment("fedavg", {"clients.sample": 3, "clients.sampling": "poisson"})
    came = np.array(
        [
            np.isin(np.arange(6), sample_clients(experiment, round, Key(0).fold_in("round", round)))
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


CROWD = MANY_CLIENTS + 1


def many_clients(sample: int, **settings: object) -> BuiltExperiment:
    """An experiment of 6 clients, said to have more than `MANY_CLIENTS`."""
    experiment = small_experiment("fedavg", {"clients.sample": 6, **settings})
    info = replace(experiment.task.info, num_clients=CROWD)
    return replace(experiment, cohort_size=sample, task=replace(experiment.task, info=info))


def test_a_sample_of_many_is_as_often_any_client() -> None:
    """600 rounds of 200: 120,000 draws, of which each tenth of the numbers gets 12,000; the deviation
    is below sqrt(120,000 * .09) = 104, and five of them are 520.
    """
    experiment = many_clients(200)
    rounds = [sample_clients(experiment, round, Key(3).fold_in(round)) for round in range(600)]
    assert all(len(found) == 200 and (np.diff(found) > 0).all() for found in rounds)
    counts = np.histogram(np.concatenate(rounds), bins=10, range=(0, CROWD))[0]
    assert np.abs(counts - 12_000).max() < 520
    np.testing.assert_array_equal(rounds[5], sample_clients(experiment, 5, Key(3).fold_in(5)))


@pytest.mark.parametrize("sample", [10, 1_000, CROWD // 3, CROWD])
def test_a_sample_of_many_has_available_clients_alone(sample: int) -> None:
    """Half are offline; so one that wants more than these gets all of them."""
    experiment = many_clients(sample, **{"clients.availability": "every(rounds=2)"})
    busy = range(0, 2_000, 4)
    found = sample_clients(experiment, 2, Key(1), busy)
    online = len(range(0, CROWD, 2))
    assert len(found) == min(sample, online - len(busy))
    assert (np.diff(found) > 0).all()
    assert not (found % 2).any()
    assert not np.isin(found, busy).any()


def test_a_sample_of_many_looks_at_few() -> None:
    experiment, asked = many_clients(10), list[int]()

    def online(clients: np.ndarray, total: int, round: int, key: Key) -> np.ndarray:
        asked.append(len(clients))
        return np.arange(len(clients)) % 4 == 0

    sample_clients(replace(experiment, availability=online), 1, Key(0))
    assert sum(asked) < 20 * 10
