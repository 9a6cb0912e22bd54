"""Whole runs with hostile clients: what an attack does, what the gate and a robust aggregator
make of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.testing.toy_task import drifting_experiment, max_rel_diff, run_rounds, state_tree

TEN: dict[str, Any] = {
    "data.name": "synthetic(samples=400, classes=3, features=4, test=0.25, spread=0.3)",
    "data.partition": "iid",
    "clients.count": 10,
    "model": "mlp(hidden=8)",
    "local.optimizer": "sgd(lr=0.3)",
    "local.batch_size": 8,
    "rounds": 6,
    "engine": "sequential",
    "precision": "fp64",
    "device": "cpu",
}


def attacked(attack: str, method: str = "fedavg", **changes: Any) -> BuiltExperiment:
    return build(parse_experiment({}, TEN | {"attack": attack, "method": method} | changes))


def accuracy(experiment: BuiltExperiment) -> float:
    return float(run_rounds(experiment, VectorizedEngine(experiment.task), 6)[1][-1]["accuracy"])


def test_two_of_ten_break_the_mean_and_not_the_median() -> None:
    clean, attack = accuracy(attacked("")), "sign_flip(fraction=0.2, scale=5)"
    assert accuracy(attacked(attack)) < clean - 0.2
    for method in (
        "fedavg+median",
        "fedavg+trimmed_mean(fraction=0.2)",
        "fedavg+multi_krum(byzantine=2)",
        "fedavg+geometric_median",
    ):
        assert accuracy(attacked(attack, method)) > clean - 0.1, method


def test_a_nan_client_is_refused_by_name_and_changes_nothing() -> None:
    experiment = attacked("nan(clients='3')")
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert all(
        [(r["client"], r["code"]) for r in line["rejected"]] == [(3, "not-finite")]
        for line in lines
    )
    without = build(parse_experiment({}, TEN | {"clients.availability": "never(clients='3')"}))
    honest, _ = run_rounds(without, SequentialEngine(without.task), 3)
    for name, value in honest.server.model.params.items():
        assert torch.equal(state.server.model.params[name], value)


@pytest.mark.parametrize(
    "attack",
    [
        "label_flip(fraction=0.3)",
        "a_little_is_enough(fraction=0.3)",
        "gaussian(fraction=0.3, std=0.1)",
        "count_lies(fraction=0.3)",
        "scaling(fraction=0.3)",
    ],
)
def test_attacks_are_the_same_on_every_engine(attack: str) -> None:
    experiment = attacked(attack)
    by_loop, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    stacked, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 4), 2)
    place, distance = max_rel_diff(state_tree(stacked), state_tree(by_loop))
    assert distance <= 1e-12, place
    assert len(experiment.metadata["attackers"].split()) == 3


def test_peers_are_deceived_too() -> None:
    """Who seems to do well is selected: attackers are used more often than without the lie."""
    lies = drifting_experiment(
        "dac(peers=2)", 1, {"attack": "similarity_lies(clients='1', loss=1e-6)", "rounds": 6}
    )
    plain = drifting_experiment("dac(peers=2)", 1, {"rounds": 6})

    def uses(experiment: BuiltExperiment) -> int:
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 6)
        assert state.client_models is not None
        return int((state.client_models.peers["dac"]["similarity"][:, 1] > 1000).sum())

    assert uses(lies) >= 2
    assert uses(plain) == 0


def test_what_makes_no_sense_is_refused_before_anything_starts() -> None:
    for attack, method, words in (
        (
            "similarity_lies",
            "fedavg",
            "changes the losses that peers measure, and this method has a server",
        ),
        ("sign_flip(fraction=0.2)", "centralized", "no clients that could be hostile"),
        ("sign_flips", "fedavg", "unknown attack"),
        ("sign_flip", "fedavg+krum(byzantine=5)", "krum needs 13 clients in a round"),
        ("", "fedwavg+median", "median counts every client alike"),
    ):
        with pytest.raises(InputError, match=words):
            attacked(attack, method)
