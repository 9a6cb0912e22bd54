"""A whole HAST round (probe, mix, train, fine-tune, validate) of 50 LeNets on several engines,
beside plain loops over clients, peers and batches.

    python benchmarks/hast_round.py [--clients 50] [--samples 250] [--epochs 3] [--repeat 3]
    [--threads 0] [--only NAME ...] [--one-at-a-time]

The thesis' setting: batch 8, 3 epochs of training and 3 of fine-tuning, 3 peers of each kind, 75
validation examples. Data are synthetic. The contenders take turns and the median counts, after a
first round of each, listed separately, in which steps are traced and compiled. Beside wall-clock
seconds it prints CPU seconds of all cores, workers included, which vary less on a busy machine. The
plain loops use one nn.Module a client, torch.optim.Adam, one peer and one batch at a time. They
probe and validate in batches of 128, which favors them; with --one-at-a-time in the batches of 8 in
which they train.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from remanence.config import parse_experiment
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment, build
from remanence.models import MODELS
from remanence.rounds.setup import first_state, make_round
from remanence.training.state import RunState

PEERS, DEPTH_TENSORS, BATCH, RATE = 3, 6, 8, 8e-5
PLAIN = "plain loops"
OURS = {  # name: engine, most clients in a stack, how steps are run
    "vectorized": ("vectorized", 0, "auto"),
    "processes": ("processes", 1, "eager"),
    "processes, captured": ("processes", 1, "captured"),
    "processes, compiled": ("processes", 1, "compiled"),
}


def prepare(clients: int, samples: int, epochs: int) -> BuiltExperiment:
    rows = (samples + samples * 3 // 10) * clients * 5 // 4 + 1000
    settings = {
        "method": f"hast(peers={PEERS}, finetune_epochs={epochs})",
        "data.name": f"synthetic(samples={rows}, classes=10, shape='3x32x32', test=0.05)",
        "model": "lenet",
        "clients.count": clients,
        "drift.schedule": "none(clusters=2)",
        "drift.concepts": "label",
        "drift.samples": samples,
        "drift.validation": samples * 3 // 10,
        "local.epochs": epochs,
        "local.batch_size": BATCH,
        "local.optimizer": f"adam(lr={RATE})",
        "peers.warmup": False,
        "rounds": 1000,
        "record.every": 1000,
        "device": "cpu",
        "engine": "vectorized",
    }
    return build(parse_experiment({}, settings))


class Plain:
    """The same work by loops over clients, peers and batches."""

    def __init__(self, experiment: BuiltExperiment, eval_batch: int):
        self.eval_batch = eval_batch
        task, client_data = experiment.task, experiment.task.population.at(0)
        self.clients = task.info.num_clients
        self.train, self.valid = (
            [
                (task.train.inputs(ids), task.train.labels(ids))
                for ids in map(torch.from_numpy, map(rows.for_client, range(self.clients)))
            ]
            for rows in (client_data.train, client_data.valid)
        )
        self.models = [MODELS["lenet"]((3, 32, 32), 10) for _ in range(self.clients)]
        self.epochs, self.random = experiment.config.local.epochs, np.random.default_rng(0)

    def run(self) -> None:
        old = [copy.deepcopy(model.state_dict()) for model in self.models]
        probe = MODELS["lenet"]((3, 32, 32), 10)
        for me, model in enumerate(self.models):
            others = np.delete(np.arange(self.clients), me)
            chosen, alike = (self.random.choice(others, PEERS, replace=False) for _ in range(2))
            for peer in chosen:
                probe.load_state_dict(old[peer])
                self.loss(probe, *self.train[me])
            state = {
                name: torch.stack([old[me][name], *(old[peer][name] for peer in chosen)]).mean(
                    dim=0
                )
                for name in old[me]
            }
            for name in list(state)[-DEPTH_TENSORS:]:
                state[name] = torch.stack([state[name], *(old[peer][name] for peer in alike)]).mean(
                    dim=0
                )
            model.load_state_dict(state)
        for me, model in enumerate(self.models):
            self.fit(model, list(model.parameters()), *self.train[me])
            tuned = copy.deepcopy(model)
            self.fit(tuned, list(tuned.parameters())[-DEPTH_TENSORS:], *self.train[me])
            if self.loss(tuned, *self.valid[me]) < self.loss(model, *self.valid[me]):
                self.models[me] = tuned

    def fit(
        self, model: nn.Module, params: list[nn.Parameter], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        for param in model.parameters():
            param.requires_grad_(any(param is mine for mine in params))
        optimizer = torch.optim.Adam(params, lr=RATE)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()

    @torch.no_grad()
    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        batches = zip(x.split(self.eval_batch), y.split(self.eval_batch), strict=True)
        parts = [cross_entropy(model(a), b, reduction="sum") for a, b in batches]
        return float(torch.stack(parts).sum() / len(y))


def ours(experiment: BuiltExperiment, name: str, folder: Path) -> Callable[[], None]:
    """A function that runs the next round on one engine."""
    engine_name, stack, steps = OURS[name]
    folder.mkdir()
    engine = make_engine(engine_name, experiment.task, stack, execution=steps)
    round = make_round(experiment, engine, folder)
    state: list[RunState] = [first_state(experiment)]

    def run() -> None:
        state[0] = round.run(state[0])[0]

    return run


def seconds_of_cores() -> float:
    """CPU seconds of this process and its workers so far."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # only Linux has /proc
            fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
            # user and system time
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def take_turn(name: str, run: Callable[[], None]) -> tuple[float, float]:
    """-> wall-clock seconds, CPU seconds of all cores"""
    begin, used = time.perf_counter(), seconds_of_cores()
    run()
    took = time.perf_counter() - begin, seconds_of_cores() - used
    print(f"{name:30s} {took[0]:7.2f} s {took[1]:7.2f} s of cores", flush=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (
        ("clients", 50),
        ("samples", 250),
        ("epochs", 3),
        ("repeat", 3),
        ("threads", 0),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="the plain loops probe and validate in batches of 8, too",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(OURS),
        default=list(OURS),
        help="the engines to measure",
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    experiment = prepare(args.clients, args.samples, args.epochs)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {PLAIN: Plain(experiment, BATCH if args.one_at_a_time else 128).run}
        contenders |= {name: ours(experiment, name, Path(folder) / name) for name in args.only}
        print("first rounds, which do not count")
        for name, run in contenders.items():
            take_turn(name, run)
        print("then")
        turns = [
            {name: take_turn(name, run) for name, run in contenders.items()}
            for _ in range(args.repeat)
        ]
    threads, version = torch.get_num_threads(), torch.__version__
    print(
        f"{args.clients} clients, {args.samples} samples, {args.epochs} epochs, {threads}"
        f" threads, torch {version}; medians:"
    )
    for name in contenders:
        real, cores = (statistics.median(turn[name][column] for turn in turns) for column in (0, 1))
        times, less = (
            statistics.median(turn[PLAIN][column] for turn in turns) / value
            for column, value in ((0, real), (1, cores))
        )
        print(
            f"{name:30s} {real:7.2f} s, {times:5.2f} times as fast as plain loops;"
            f" {cores:7.2f} s of cores, {less:5.2f} times less"
        )


if __name__ == "__main__":
    main()
