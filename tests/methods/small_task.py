"""One small experiment for both witnesses: as the program builds it, and as the plain tensors a
reference needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from reference import federated
from torch import Tensor, nn

from remanence.core.slots import Method, Part
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import run_rounds, small_experiment
from remanence.training.state import RunState

CLASSES, ROUNDS, COHORT, BATCH, SEED = 5, 3, 3, 4, 4
# clients of different sizes, half of them in a round, a rate that changes from round to round
SETTINGS = {
    "data.partition": "dirichlet_by_class(alpha=0.3, minimum=2)",
    "local.optimizer": "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)",
    "local.schedule": "exponential(decay=0.8)",
    "local.batch_size": BATCH,
    "clients.sample": COHORT,
    "rounds": ROUNDS,
    "seed": SEED,
}
SAME = {"rounds": ROUNDS, "cohort": COHORT, "epochs": 1, "batch": BATCH, "seed": SEED}
SAME |= {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "schedule": "exponential", "decay": 0.8}


class Plain(NamedTuple):
    """The same experiment in plain tensors."""

    x: Tensor  # [n, ...] normalized
    y: Tensor  # [n]
    rows: list[np.ndarray]  # each client's training rows
    public: np.ndarray  # the server's rows
    setting: federated.Setting


class ConvNet(nn.Module):
    """A convolution without bias before batch norm: a bias there has a gradient of pure
    rounding, which Adam would blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def make_net(kind: str) -> nn.Module:
    """The same weights every time; kind: mlp, or conv with batch norm."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = (
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES))
            if kind == "mlp"
            else ConvNet()
        )
    return net.double()


def make_experiment(method: Part | Method, kind: str, **changes: Any) -> BuiltExperiment:
    form = "features=6" if kind == "mlp" else "shape='2x6x6'"
    data = {"data.name": f"synthetic(samples=100, classes={CLASSES}, {form})"}
    return small_experiment(method, data | SETTINGS | changes, module=make_net(kind))


def in_plain_tensors(experiment: BuiltExperiment, **setting: Any) -> Plain:
    held = experiment.task.population.at(0).train
    assert len(set(held.sizes.tolist())) > 1, "clients of equal size would hide a wrong weight"
    train = experiment.dataset.train
    rows = [held.for_client(client) for client in range(len(held.sizes))]
    chosen = federated.Setting(**SAME | setting)
    return Plain(
        federated.normalize(train.x),
        torch.from_numpy(train.y),
        rows,
        experiment.task.public.numpy(),
        chosen,
    )


def play_all(experiment: BuiltExperiment) -> RunState:
    """All rounds on the plain engine."""
    return run_rounds(experiment, SequentialEngine(experiment.task), ROUNDS)[0]


def largest_gap(state: RunState, wanted: dict[str, Tensor], kind: str) -> float:
    """Between the program's global model and the reference's."""
    found = {**state.server.model.params, **state.server.model.buffers}
    assert found.keys() == wanted.keys()
    moved = max(
        float((wanted[name] - start).abs().max())
        for name, start in make_net(kind).state_dict().items()
    )
    assert moved > 0.01, "a model that hardly moved proves nothing"
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
