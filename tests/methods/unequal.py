"""The experiment on which methods meet their witnesses: three rounds, clients of different
sizes, half of them in a round, float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from methods.small_task import CLASSES, make_net
from reference.federated import Setting, normalize
from torch import Tensor

from remanence.core.slots import Method, Part
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import run_rounds, small_experiment
from remanence.training.state import RunState

SETTING = Setting(
    rounds=3, cohort=4, epochs=2, batch=4, lr=0.1, momentum=0.9, weight_decay=0.01, seed=4
)


def make_experiment(method: str | Part | Method, kind: str, **changes: Any) -> BuiltExperiment:
    settings = {
        "data.name": f"synthetic(samples=100, classes={CLASSES},"
        f" {'features=6' if kind == 'mlp' else 'shape=' + repr('2x6x6')})",
        "data.partition": "dirichlet_by_class(alpha=0.3, minimum=2)",
        "local.optimizer": "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)",
        "local.epochs": 2,
        "clients.sample": 4,
        "rounds": 3,
        "seed": 4,
    }
    return small_experiment(method, settings | changes, module=make_net(kind))


def the_data(experiment: BuiltExperiment) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """-> x [n, ...] normalized, y [n], the training rows of each client"""
    rows = experiment.task.population.at(0).train
    assert len(set(rows.sizes.tolist())) > 1, "clients of equal size would hide a wrong weight"
    x, y = normalize(experiment.dataset.train.x), torch.from_numpy(experiment.dataset.train.y)
    return x, y, [rows.for_client(client) for client in range(len(rows.sizes))]


def play_loop(experiment: BuiltExperiment, rounds: int = 3) -> RunState:
    return run_rounds(experiment, SequentialEngine(experiment.task), rounds)[0]


def global_values(state: RunState) -> dict[str, Tensor]:
    return {**state.server.model.params, **state.server.model.buffers}


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of two models that have the same names."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
