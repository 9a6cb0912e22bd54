"""One small experiment under drift for both witnesses: as the program builds it, and as the plain
tensors a reference needs.

Six clients in three clusters that disagree on labels and differ in size; at the second time step
everybody moves on to the next cluster.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.federated import normalize
from reference.gossip import Rows, Training
from torch import nn

from remanence.core.engine import Engine
from remanence.core.rng import Key
from remanence.core.slots import Method, Part
from remanence.data.batches import plan_batches
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.setup import first_state, make_round
from remanence.testing.toy_task import small_experiment
from remanence.training.state import RunState

CLIENTS, CLASSES, SEED, BATCH, STEPS, ROUNDS = 6, 4, 3, 4, 2, 3
# the label of each label of the source, by cluster
SWAPS = ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2))
OPTIMIZERS: dict[str, tuple[str, Training]] = {
    "sgd": (
        "sgd(lr=0.1, momentum=0.9, weight_decay=0.01)",
        Training(
            "sgd",
            lr=0.1,
            momentum=0.9,
            weight_decay=0.01,
            rate=lambda round: 0.1 * 0.9 ** (max(round, 1) - 1),
        ),
    ),
    "adam": (
        "adam(lr=0.02, eps=0.0001)",
        Training("adam", lr=0.02, eps=0.0001, rate=lambda round: 0.02 * 0.9 ** (max(round, 1) - 1)),
    ),
}
SETTINGS: dict[str, Any] = {
    "data.name": f"synthetic(samples=150, classes={CLASSES}, features=5, test=0.2)",
    "drift.schedule": "rotation(clusters=3)",
    "drift.concepts": "swap+quantity(shares='1|0.7|0.4')",
    "drift.samples": 12,
    "drift.validation": 5,
    "drift.time_steps": STEPS,
    "rounds": ROUNDS,
    "clients.count": CLIENTS,
    "clients.sample": None,
    "local.batch_size": BATCH,
    "local.schedule": "exponential(decay=0.9)",
    "seed": SEED,
}


def make_net(kind: str = "mlp") -> nn.Module:
    """The same weights every time; kind: mlp with three layers, or batch norm, whose bias-free
    first layer has no gradient of pure rounding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "mlp":
            return nn.Sequential(
                nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES)
            ).double()
        return nn.Sequential(
            nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
        ).double()


def make_experiment(
    method: str | Part | Method, optimizer: str = "sgd", kind: str = "mlp", **changes: Any
) -> BuiltExperiment:
    settings = SETTINGS | {"local.optimizer": OPTIMIZERS[optimizer][0]} | changes
    return small_experiment(method, settings, module=make_net(kind))


def read_rows(experiment: BuiltExperiment) -> Callable[[str], Callable[[int, int], Rows]]:
    """`read_rows(experiment)("train")(time step, client)`: inputs and labels, the labels worked
    out here from the clusters.
    """
    source, population = experiment.dataset, experiment.task.population
    x, y = normalize(source.train.x), source.train.y
    sizes = [step.train.sizes.tolist() for step in population.time_steps]
    assert sizes[0] != sizes[-1] or len(population.time_steps) == 1 or len(set(sizes[0])) == 1, (
        "sizes must change, or old ones would pass"
    )

    def of(split: str) -> Callable[[int, int], Rows]:
        def read(step: int, client: int) -> Rows:
            client_data = population.at(step)
            rows = (client_data.train if split == "train" else client_data.valid).for_client(
                client
            ) % len(y)
            swap = np.array(SWAPS[int(client_data.cluster[client])])
            return x[rows], torch.from_numpy(swap[y[rows]])

        return read

    return of


def read_batches(
    experiment: BuiltExperiment, epochs: dict[int, int]
) -> Callable[[int, int, int | str], list[Rows]]:
    """(round, client, phase) -> its batches, planned by the program's keys; epochs: of each
    phase.
    """
    train = read_rows(experiment)("train")

    def batches(round: int, client: int, phase: int | str) -> list[Rows]:
        # the training before round 1 is a first phase of a round 0
        number = phase if isinstance(phase, int) else 0
        x, y = train((max(round, 1) - 1) // experiment.config.rounds, client)
        if not epochs[number]:
            return []
        key = Key(SEED).fold_in("round", round, "client", client, "plan", number)
        plan = plan_batches(key, len(y), BATCH, epochs=epochs[number])
        places = [row[:width] for row, width in zip(plan.indices, plan.batch_sizes, strict=True)]
        return [(x[place], y[place]) for place in places]

    return batches


def play_states(
    experiment: BuiltExperiment, engine: Engine, rounds: int = 0
) -> tuple[list[RunState], list[dict[str, Any]]]:
    """-> the state after every round, the first state among them, and the line written about
    each round
    """
    states, lines = [first_state(experiment)], []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(make_round(experiment, engine, Path(folder))) as round,
    ):
        for _ in range(rounds or experiment.config.total_rounds):
            state, line = round.run(states[-1])
            states.append(state)
            lines.append(line)
    return states, lines
