"""The methods of the table among themselves: every pair that fits runs the same on two engines, and every method learns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import remanence as rem
from remanence.algorithms import METHODS
from remanence.compose import ONE, check
from remanence.engines.loop import Loop
from remanence.engines.stacked import Stacked
from remanence.errors import InputError
from remanence.trial import as_method, play, quickly, small_experiment, state_tree, worst_difference


def fits(pair: tuple[str, str]) -> bool:
    try:
        check(as_method(f"{quickly(pair[0])}+{quickly(pair[1])}"))
    except InputError:
        return False
    return True


PAIRS = [pair for pair in itertools.combinations(sorted(METHODS), 2) if fits(pair)]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_that_fits_runs_the_same_stacked(pair: tuple[str, str]) -> None:
    experiment = small_experiment(f"{quickly(pair[0])}+{quickly(pair[1])}")
    oracle, lines = play(experiment, Loop(experiment.task), 2)
    state, _ = play(experiment, Stacked(experiment.task, 3), 2)
    place, distance = worst_difference(state_tree(state), state_tree(oracle))
    assert distance <= 1e-12, place
    assert not any(line["abandoned"] or line["refused"] for line in lines)


def test_pairs_that_do_not_fit_fill_the_same_slot() -> None:
    """What is refused is refused for a reason: both parts fill a slot that takes one."""
    for pair in itertools.combinations(sorted(METHODS), 2):
        a, b = (METHODS[name]() for name in pair)
        clash = any(getattr(a, slot) is not None and getattr(b, slot) is not None for slot in ONE)
        assert (pair in PAIRS) == (not clash), pair
    assert len(PAIRS) > 100


LEARNING: dict[str, Any] = {"data": "digits", "clients": 20, "sample": 5, "epochs": 2, "batch": 16, "lr": 0.1, "rounds": 30, "quiet": True}
# fedreg takes 14 gradients a step, so its run is shorter and is compared with one as short
SPECIAL: dict[str, dict[str, Any]] = {"fedreg": {"rounds": 12}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedbn"])  # whose global model has no normalisation of its own
def test_every_method_learns(name: str) -> None:
    """Within five points of FedAvg or above, over two seeds, on digits with 20 clients under Dirichlet .1; the mean of the last five rounds."""
    method = {"feddf": "feddf(steps=200, patience=100)"}.get(name, name)

    def accuracy(method: str) -> float:
        ends = []
        for seed in range(2):
            more = SPECIAL.get(name, {})
            run = rem.run(method=method, seed=seed, engine="loop", public=100, set={"threads": 1}, **LEARNING | more)
            ends += run.curve()[1][-5:]
        return sum(ends) / len(ends)

    assert accuracy(method) > accuracy("fedavg") - 0.05
