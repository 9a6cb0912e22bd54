"""The small experiment of FedNova and SCAFFOLD: three of six clients of different sizes in a
round, plain SGD, float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import small_experiment


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()


def make_experiment(method: Any, **more: Any) -> BuiltExperiment:
    settings = {
        "data.name": "synthetic(samples=100, classes=5, features=6)",
        "data.partition": "dirichlet_by_class(alpha=0.3, minimum=2)",
        "local.optimizer": "sgd(lr=0.1)",
        "clients.sample": 3,
        "rounds": 3,
        "seed": 4,
    }
    return small_experiment(method, settings | more, module=make_net())
