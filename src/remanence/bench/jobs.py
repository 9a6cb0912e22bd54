"""The jobs of `remanence bench`: experiments of the sizes in the papers on synthetic data, so that
nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remanence.config import parse_experiment
from remanence.core.engine import ClientWork
from remanence.experiment.build import BuiltExperiment, build
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.training.state import RunState

IMAGES = "synthetic(samples={samples}, classes=10, shape='3x32x32', test={test})"
CIFAR = IMAGES.format(samples=60_000, test=1 / 6)  # 50,000 and 10,000, like CIFAR-10
PLAIN: dict[str, Any] = {
    "data.validation": 0,
    "data.partition": "iid",
    "record.personal": 0,
    "record.every": 1_000,
}
# Flashback's label counts: without any, as in round 1, it would not distill
SEEN_PER_CLASS = 100.0


@dataclass(frozen=True)
class BenchJob:
    """One job of the benchmark.

    Args:
        name: The name on the command line.
        about: What it is, for the table.
        settings: The experiment's settings.
        measure: What is timed. "train": a round up to the new model; "round": a whole round
            without a server; "score": the round's local models on the test set; "together": the
            training of several seeds in one stack; "memory": the peak memory of several rounds.
        relative_to: The job whose time is compared with this one's.
        cuda_only: Whether it is left out on a CPU unless it is named, since it takes minutes.
        seeds: The number of runs that train together.
        rounds: Rounds of a memory job: enough that two thirds of the clients take part.
        smaller: Settings of the smaller job that a memory job is compared with.
    """

    name: str
    about: str
    settings: Mapping[str, Any]
    measure: str = "train"
    relative_to: str = ""
    cuda_only: bool = False
    seeds: int = 1
    rounds: int = 0
    smaller: Mapping[str, Any] = field(default_factory=dict)


CNN = PLAIN | {
    "data.name": CIFAR,
    "clients.count": 100,
    "clients.sample": 10,
    "model": "cnn",
    "local.batch_size": 50,
    "local.optimizer": "sgd(lr=0.05)",
}
RESNET = PLAIN | {
    "data.name": IMAGES.format(samples=5_000, test=0.1),
    "clients.count": 10,
    "local.batch_size": 64,
    "local.epochs": 3,
    "local.optimizer": "sgd(lr=0.05)",
}
TABLE = "synthetic(samples={samples}, classes=10, features=32, test=0.02)"
MANY = PLAIN | {
    "clients.sample": 100,
    "model": "mlp(hidden=64)",
    "local.batch_size": 10,
    "method": "fedavg",
}
LENETS = PLAIN | {
    "model": "lenet",
    "clients.sample": 500,
    "local.batch_size": 10,
    "method": "scaffold",
    "local.optimizer": "sgd(lr=0.05)",
}

HAST = PLAIN | {
    "data.name": IMAGES.format(samples=15_625, test=0.2),
    "clients.count": 50,
    "model": "lenet",
    "local.batch_size": 8,
    "local.epochs": 3,
    "local.optimizer": "adam(lr=0.001)",
}
DRIFT = {
    "method": "hast(peers=3, depth=3, finetune_epochs=3)",
    "data.name": IMAGES.format(samples=25_000, test=0.2),
    "drift.schedule": "none(clusters=2)",
    "drift.concepts": "label",
    "drift.samples": 250,
    "drift.validation": 75,
    "peers.warmup": False,
    "rounds": 1_000_000,
    "record.every": 1_000_000,
}

JOBS: dict[str, BenchJob] = {
    job.name: job
    for job in (
        BenchJob(
            "A",
            "HAST training: 50 LeNets, 250 examples each, batch 8, 3 epochs, Adam",
            HAST,
        ),
        BenchJob("B", "CNN: 10 of 100 clients, 500 examples each, batch 50, 1 epoch, SGD", CNN),
        BenchJob(
            "B2",
            "as B with Dirichlet-by-class sizes, 5 epochs",
            CNN | {"data.partition": "dirichlet_by_class(alpha=0.1)", "local.epochs": 5},
        ),
        BenchJob(
            "C",
            "ResNet-18 with group norm: 10 clients, 450 examples each, batch 64, 3 epochs, SGD",
            RESNET | {"model": "resnet18(norm='group')"},
            cuda_only=True,
        ),
        BenchJob(
            "D",
            "whole HAST round of A's clients: evaluate 3 peers, average, train, fine-tune 3"
            " epochs, validate on 75 examples",
            HAST | DRIFT,
            measure="round",
            relative_to="A",
        ),
        BenchJob(
            "C-mixed",
            "as C with batch and group norm mixed",
            RESNET | {"model": "resnet18(norm='mixed')"},
            cuda_only=True,
        ),
        BenchJob(
            "E",
            "Flashback round: B with teachers and server distillation on 1,250 examples, 1 epoch",
            CNN | {"method": "flashback(server_epochs=1)", "data.public": 1250},
            relative_to="B",
        ),
        BenchJob(
            "F",
            "all local models of B on 10,000 test images",
            CNN,
            measure="score",
            relative_to="B",
        ),
        BenchJob(
            "G", "three seeds of A in one stack", HAST, measure="together", relative_to="A", seeds=3
        ),
        BenchJob(
            "H",
            "memory of FedAvg with 100,000 clients, 100 a round, against 1,000 clients",
            MANY | {"data.name": TABLE.format(samples=1_020_408), "clients.count": 100_000},
            measure="memory",
            rounds=20,
            smaller={"clients.count": 1_000},
        ),
        BenchJob(
            "H-scaffold",
            "memory of SCAFFOLD with 10,000 LeNets, 500 a round, against 1,000",
            LENETS
            | {
                "data.name": "synthetic(samples=20200, classes=10, shape='3x32x32', test=0.01)",
                "clients.count": 10_000,
            },
            measure="memory",
            rounds=20,
            smaller={"clients.count": 1_000},
        ),
    )
}


def prepare(
    job: BenchJob, device: str, precision: str, changes: Mapping[str, Any] | None = None
) -> tuple[BuiltExperiment, RunState, ClientWork]:
    """Build a job's experiment. -> the experiment, its first state, the work of round 1"""
    experiment = build(
        parse_experiment(
            {},
            {
                **job.settings,
                **(changes or {}),
                "device": device,
                "precision": precision,
                "engine": "auto",
            },
        )
    )
    state = first_state(experiment)
    distiller = experiment.task.method.part_filling("server_train")
    if distiller is not None and "pi" in state.server.state.get(distiller.name, {}):
        server_state = dict(state.server.state)
        counts = torch.full_like(server_state[distiller.name]["pi"], SEEN_PER_CLASS)
        server_state[distiller.name] = server_state[distiller.name] | {"pi": counts}
        state = replace(state, server=replace(state.server, state=server_state))
    return experiment, state, make_work(experiment, state, 1)
