"""benchmarks/choices.py: what follows from measured numbers, worked out by hand."""

from __future__ import annotations

import pytest
from bench.scripts import load_script

from remanence.engines.autotune import Candidate
from remanence.engines.cost import Timing, Workload
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment

choices = load_script("choices")

SEQUENTIAL = Candidate("sequential")
EAGER, CAPTURED, COMPILED = (
    Candidate("processes", 1, execution) for execution in ("eager", "captured", "compiled")
)
TIMINGS = {
    SEQUENTIAL: Timing(0.010),
    EAGER: Timing(0.005, 0.1),
    CAPTURED: Timing(0.004, 0.2),
    COMPILED: Timing(0.001, 40.0, compiles=True),
}


def make_measured() -> choices.Measured:
    """Four clients that make two steps each a round."""
    images = {
        "data.name": "synthetic(samples=64, classes=4, shape='1x16x16', test=0.25)",
        "model": "lenet",
        "data.partition": "iid",
        "clients.sample": 4,
    }
    experiment = small_experiment("fedavg", images)
    work = make_work(experiment, first_state(experiment), 1)
    return choices.Measured("lenet", TIMINGS, 8, experiment, work)


@pytest.mark.parametrize(
    ("workload", "best", "seconds"),
    [
        (Workload(1), SEQUENTIAL, 8 * 0.010),
        (Workload(100), CAPTURED, 800 * 0.004 + 0.2),
        (Workload(10_000), COMPILED, 80_000 * 0.001 + 40.0),
        # compiled twice; each run then finds its method's steps, but the first one has them
        (Workload(10_000, runs=4, methods=2), COMPILED, 80_000 * 0.001 + (2 + 0.3) * 40.0),
    ],
)
def test_the_best_choice(workload: Workload, best: Candidate, seconds: float) -> None:
    cell = choices.decide(make_measured(), workload)
    assert cell.best == best
    assert cell.best_s == pytest.approx(seconds)


def test_trials_count_for_auto() -> None:
    """Two trainings of 3 steps each: of two clients one after the other, and of four by workers,
    after their start.
    """
    cell = choices.decide(make_measured(), Workload(1))
    assert cell.chosen == SEQUENTIAL
    assert cell.trials_s == pytest.approx(12 * 0.010 + 0.1 + 24 * 0.005)
    assert cell.chosen_s == pytest.approx(cell.trials_s + 8 * 0.010)
    assert choices.is_right(cell)


def test_a_wrong_choice_is_marked() -> None:
    cell = choices.decide(make_measured(), Workload(10_000))
    wrong = cell._replace(chosen=SEQUENTIAL, chosen_s=800.0)
    assert "(!)" in choices.table([wrong])
    assert "(!)" not in choices.table([cell._replace(chosen_s=1.1 * cell.best_s)])


def test_commands_that_fit_are_verified_of_different_networks_first() -> None:
    cell = choices.decide(make_measured(), Workload(100))
    cells = [
        cell._replace(network=network, best_s=seconds)
        for network, seconds in (("a", 5.0), ("a", 9.0), ("a", 90.0), ("b", 2.0), ("b", 1.0))
    ]
    chosen = [(c.network, c.best_s) for c in choices.to_verify(cells, 3, 10.0)]
    assert chosen == [("a", 9.0), ("b", 2.0), ("a", 5.0)]
