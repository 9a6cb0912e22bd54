"""The methods of the table among themselves: every pair that fits runs the same on two engines,
and every method learns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

import remanence as rem
from remanence.core.compose_checks import (
    EXCLUSIVE_SLOTS,
    SERVER_SLOTS,
    STATEFUL_SERVER_SLOTS,
    check,
)
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.methods import METHODS
from remanence.testing.toy_task import (
    as_method,
    fast_config,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)


def fits(pair: tuple[str, str]) -> bool:
    try:
        check(as_method(f"{fast_config(pair[0])}+{fast_config(pair[1])}"))
    except InputError:
        return False
    return True


PAIRS = [pair for pair in itertools.combinations(sorted(METHODS), 2) if fits(pair)]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_that_fits_runs_the_same_stacked(pair: tuple[str, str]) -> None:
    experiment = small_experiment(f"{fast_config(pair[0])}+{fast_config(pair[1])}")
    oracle, lines = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    state, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 3), 2)
    place, distance = max_rel_diff(state_tree(state), state_tree(oracle))
    assert distance <= 1e-12, place
    assert not any(line["abandoned"] or line["rejected"] for line in lines)


def fills(p: Part, slots: Iterable[str]) -> bool:
    return any(getattr(p, slot) is not None for slot in slots)


def clash(a: Part, b: Part) -> bool:
    """Both fill a slot that takes one; or one has no server and the other works there; or one
    has several global models and the other is made for one.
    """
    same_slot = any(fills(a, [slot]) and fills(b, [slot]) for slot in EXCLUSIVE_SLOTS)
    nowhere_to_work = a.peers is not None and (fills(b, SERVER_SLOTS) or b.centralized)
    made_for_one = a.model_assignment is not None and (
        fills(b, STATEFUL_SERVER_SLOTS) or b.centralized
    )
    return same_slot or nowhere_to_work or made_for_one


def test_pairs_that_do_not_fit_are_refused_for_a_reason() -> None:
    for pair in itertools.combinations(sorted(METHODS), 2):
        a, b = (METHODS[name]() for name in pair)
        assert (pair in PAIRS) == (not clash(a, b) and not clash(b, a)), pair
    assert len(PAIRS) > 100
    assert {
        ("fedprox", "hast"),
        ("fedbn", "random"),
        ("fedavg", "feddrift"),
        ("fedprox", "local"),
    } <= set(PAIRS)
    assert not {
        ("dac", "hast"),
        ("fedadam", "hast"),
        ("centralized", "random"),
        ("feddrift", "hast"),
        ("feddrift", "scaffold"),
    } & set(PAIRS)


LEARNING: dict[str, Any] = {
    "data": "digits",
    "clients": 20,
    "sample": 5,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "rounds": 30,
    "quiet": True,
}


@pytest.mark.slow
# fedbn's global model has no normalization of its own, and without a server there is no global
# model
@pytest.mark.parametrize(
    "name", [name for name in METHODS if name != "fedbn" and METHODS[name]().peers is None]
)
def test_every_method_learns(name: str) -> None:
    """Within five points of FedAvg or above, over two seeds, on digits with 20 clients under
    Dirichlet .1; the mean of the last five rounds.
    """
    method = {"feddf": "feddf(steps=200, patience=100)"}.get(name, name)

    def accuracy(method: str) -> float:
        ends = []
        for seed in range(2):
            run = rem.run(
                method=method,
                seed=seed,
                engine="sequential",
                public=100,
                set={"threads": 1},
                **LEARNING,
            )
            ends += run.curve()[1][-5:]
        return sum(ends) / len(ends)

    assert accuracy(method) > accuracy("fedavg") - 0.05


ALONE: dict[str, Any] = {
    "data": "digits",
    "clients": 10,
    "partition": "dirichlet(alpha=1)",
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "rounds": 8,
    "engine": "vectorized",
    "quiet": True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name]().peers is not None and name != "local"]
)
def test_every_method_without_a_server_gains_by_listening(name: str) -> None:
    """Its clients' own models on the whole test set, against those of clients that train alone:
    five points or more above, on digits under Dirichlet 1.
    """

    def accuracy(method: str) -> float:
        return rem.run(method=method, set={"threads": 1}, **ALONE).curve(model="personal")[1][-1]

    assert accuracy(fast_config(name)) > accuracy("local") + 0.05
