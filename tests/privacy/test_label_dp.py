"""Label counts with noise: how much, drawn how often, and who sees them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from remanence.core.errors import InputError
from remanence.core.rng import Key
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.methods import dp_counts, fedwavg
from remanence.privacy.label_dp import privatize_label_counts
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    drifting_experiment,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)


def blurred(noise: float, counts: list[float], keys: int) -> torch.Tensor:
    """-> [keys, C]"""
    return privatize_label_counts(
        dp_counts(noise=noise),
        torch.tensor([counts] * keys, dtype=torch.float64),
        np.arange(keys),
        0,
        Key(1),
    )


def test_the_deviation_of_the_noise() -> None:
    """Far from 0 nothing is cut off. 500 clients of 4 counts know a deviation to 1 / sqrt(2 *
    2000) = 1.6%; four times that is allowed.
    """
    drawn = blurred(3.0, [100, 200, 300, 400], 500)
    assert float((drawn - torch.tensor([100.0, 200, 300, 400])).std()) == pytest.approx(
        3.0, rel=0.064
    )
    assert drawn.mean(dim=0).tolist() == pytest.approx(
        [100, 200, 300, 400], abs=4 * 3 / math.sqrt(500)
    )


def test_counts_never_fall_below_nothing_and_never_all_of_them() -> None:
    """With two counts of 0 both are cut off in a quarter of all draws, and then both are 1: a
    share of a class is always a number.
    """
    drawn = blurred(1.0, [0, 0], 400)
    assert bool((drawn >= 0).all())
    assert bool((drawn.sum(dim=1) > 0).all())
    both = (drawn == 1).all(dim=1).double().mean()
    assert float(both) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 400))


def test_drawn_once_for_the_data_of_a_time_step() -> None:
    """In every round the same, or a mean over rounds would tell the truth; new where the data
    are new.
    """
    experiment = small_experiment(
        "flashback+dp_counts(noise=2)", {"clients.sample": 6, "rounds": 3}
    )
    state = first_state(experiment)
    first, third = (make_work(experiment, state, round).stats.label_counts for round in (1, 3))
    assert torch.equal(first, third)
    plain = make_work(small_experiment("flashback", {"clients.sample": 6}), state, 1).stats
    assert not torch.equal(first, plain.label_counts)
    # every client and class has noise of its own
    assert len(torch.unique(first - plain.label_counts)) > 6
    # how many rows there are is taken to be known
    assert torch.equal(make_work(experiment, state, 1).stats.size, plain.size)
    drifting = drifting_experiment("fedavg+dp_counts", 2)
    everybody = np.arange(6)
    steps = [drifting.client_stats(everybody, step).label_counts for step in (0, 1)]
    true = [
        drifting_experiment("fedavg", 2).client_stats(everybody, step).label_counts
        for step in (0, 1)
    ]
    assert bool(((steps[0] - true[0]) != (steps[1] - true[1])).any())


def test_what_is_sent_is_what_is_seen() -> None:
    """Flashback's extras, its loss at the client and the server's sum pi all hold the noisy
    counts.
    """
    experiment = small_experiment("flashback(gamma=1.0)+dp_counts(noise=2)", {"clients.sample": 6})
    job = make_work(experiment, first_state(experiment), 1)
    sent = torch.cat(
        [
            reply.payload["flashback"]["label_counts"]
            for reply in SequentialEngine(experiment.task).train(job)
        ]
    )
    assert torch.equal(sent, job.stats.label_counts)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert torch.allclose(
        state.server.state["flashback"]["pi"], job.stats.label_counts.sum(dim=0), rtol=0, atol=1e-10
    )
    other, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 3), 1)
    assert max_rel_diff(state_tree(other), state_tree(state))[1] <= TOLERANCE


def test_forgotten_rows_are_counted_with_noise() -> None:
    """FedWAvg's F in round 2, when there is something to count: off by the noise, and never
    below 0.
    """
    counts = []
    for method in (fedwavg(), fedwavg(noise=4.0)):
        experiment = small_experiment(method, {"clients.sample": 6})
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
        job = make_work(experiment, state, 2)
        counts.append(
            torch.cat(
                [
                    reply.payload["fedwavg"]["forgettable"]
                    for reply in SequentialEngine(experiment.task).train(job)
                ]
            )
        )
    true, noisy = counts
    assert bool((noisy >= 0).all())
    assert not torch.equal(true, noisy)
    assert float((true - noisy).abs().max()) < 4.0 * 6
    assert bool((true == true.round()).all())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dp_counts(noise=0), "dp_counts: noise must be a number above 0, not 0"),
        (lambda: dp_counts(delta=2), "dp_counts: delta"),
        (lambda: fedwavg(noise=-1), "fedwavg: noise must be a number of at least 0"),
    ],
)
def test_settings_that_cannot_be(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()
