"""How often an attack gets its way: on rows made for it, by a model whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remanence.attacks import Adversary, parse_attacks
from remanence.config import parse_experiment
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment, build
from remanence.rounds.attack_success import attack_success
from remanence.rounds.loop import start_run
from remanence.testing.toy_task import run_rounds, small_experiment


def always(experiment: BuiltExperiment, label: int) -> ModelState:
    """The model that takes everything for one class: the head has no weights, and one large
    bias.
    """
    params = {
        name: torch.zeros_like(value).unsqueeze(0)
        for name, value in experiment.task.model.initial.params.items()
    }
    params["head.bias"][0, label] = 10.0
    return ModelState(params, {})


def success_of(attack: str, model: int) -> float | None:
    experiment = small_experiment()
    adversary = Adversary.select(parse_attacks(attack), 6, Key(0))
    measure = attack_success(experiment.task, experiment.dataset, adversary)
    return None if measure is None else float(measure(always(experiment, model))[0])


def test_a_model_that_says_the_target_always_and_one_that_never_does() -> None:
    assert success_of("backdoor(target=1, size=1)", model=1) == 1.0
    assert success_of("backdoor(target=1, size=1)", model=2) == 0.0
    assert success_of("label_flip(of=1, to='3')", model=3) == 1.0
    assert success_of("label_flip(of=1, to='3')", model=1) == 0.0
    assert success_of("label_flip(of=3, to='next')", model=0) == 1.0  # the last becomes 0


@pytest.mark.parametrize(
    "attack",
    [
        "",
        "none",
        "sign_flip",
        "label_flip(to='random')",
        "label_flip",
        "label_flip(of=1, to='random')",
    ],
)
def test_attacks_without_a_goal_that_can_be_seen(attack: str) -> None:
    assert success_of(attack, model=0) is None


def test_two_goals_count_by_their_rows() -> None:
    """The model always says 1. The mark wants 1, on all test rows of other classes; the flip of
    class 2 wants 3, on all test rows of class 2.
    """
    test = small_experiment().dataset.test.y
    others, twos = int((test != 1).sum()), int((test == 2).sum())
    assert success_of(
        "backdoor(target=1, size=1)+label_flip(of=2, to='3')", model=1
    ) == pytest.approx(others / (others + twos))


DIGITS: dict[str, Any] = {
    "data.name": "digits",
    "data.partition": "iid",
    "clients.count": 10,
    "engine": "sequential",
    "threads": 1,
    "rounds": 3,
}


def test_a_backdoor_is_written_down_and_read_back(tmp_path: Path) -> None:
    """Every marked row of three in ten clients wants class 0: after a few rounds the mark
    works, and an honest run has nothing to tell.
    """
    config = parse_experiment(
        {}, DIGITS | {"attack": "backdoor(fraction=0.3, share=0.5)", "local.epochs": 3}
    )
    run = start_run(config, tmp_path / "run")
    _, success = run.curve(value="attack_success")
    assert len(success) == 3
    assert success[-1] > 0.5
    assert all("attack_success" not in line for line in run.metrics if line["split"] != "test")


def test_without_a_server_only_honest_clients_count() -> None:
    """Success is the mean over the clients that do not attack: their best models, each on all
    rows.
    """
    config = parse_experiment(
        {},
        DIGITS
        | {"attack": "backdoor(clients='2 5')", "method": "local", "rounds": 1, "clients.count": 6},
    )
    experiment = build(config)
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    measure = attack_success(experiment.task, experiment.dataset, experiment.adversary)
    assert measure is not None
    assert state.client_models is not None
    each = measure(state.client_models.best)
    assert lines[0]["attack_success"] == pytest.approx(np.delete(each, [2, 5]).mean())
    assert each[[2, 5]].min() > lines[0]["attack_success"]
