"""A whole HAST round (probe, mix, train, fine-tune, validate) of 50 LeNets: ours, stacked and by the engine of choice, beside plain loops over clients,
peers and batches.

    python benchmarks/hast_round.py [--clients 50] [--samples 250] [--epochs 3] [--repeat 3] [--threads 0]

The thesis' setting: batch 8, 3 epochs of training and 3 of fine-tuning, 3 peers of each kind, 75 validation rows. Data are made on the spot. The contenders
take turns; the median counts. The plain loops are the usual way: one nn.Module a client, torch.optim.Adam, one peer and one batch at a time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from remanence.config import make_spec
from remanence.engines.choose import make_engine
from remanence.experiment import Experiment, build
from remanence.models import MODELS
from remanence.rounds import first_state, open_recorder, play_round
from remanence.state import RunState

PEERS, DEPTH_TENSORS, BATCH, RATE = 3, 6, 8, 8e-5


def prepare(clients: int, samples: int, epochs: int) -> Experiment:
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
        "local.batch": BATCH,
        "local.optimizer": f"adam(lr={RATE})",
        "peers.warmup": False,
        "rounds": 1000,
        "record.every": 1000,
        "device": "cpu",
        "engine": "stacked",
    }
    return build(make_spec({}, settings))


class Plain:
    """The same work by loops over clients, peers and batches."""

    def __init__(self, experiment: Experiment):
        task, holdings = experiment.task, experiment.task.population.at(0)
        self.clients = task.world.clients
        self.train, self.valid = (
            [(task.train.inputs(ids), task.train.labels(ids)) for ids in map(torch.from_numpy, map(rows.of, range(self.clients)))]
            for rows in (holdings.train, holdings.valid)
        )
        self.models = [MODELS["lenet"]((3, 32, 32), 10) for _ in range(self.clients)]
        self.epochs, self.random = experiment.spec.local.epochs, np.random.default_rng(0)

    def play(self) -> None:
        old = [copy.deepcopy(model.state_dict()) for model in self.models]
        probe = MODELS["lenet"]((3, 32, 32), 10)
        for me, model in enumerate(self.models):
            others = np.delete(np.arange(self.clients), me)
            chosen, alike = (self.random.choice(others, PEERS, replace=False) for _ in range(2))
            for peer in chosen:
                probe.load_state_dict(old[peer])
                self.loss(probe, *self.train[me])
            state = {name: torch.stack([old[me][name], *(old[peer][name] for peer in chosen)]).mean(dim=0) for name in old[me]}
            for name in list(state)[-DEPTH_TENSORS:]:
                state[name] = torch.stack([state[name], *(old[peer][name] for peer in alike)]).mean(dim=0)
            model.load_state_dict(state)
        for me, model in enumerate(self.models):
            self.fit(model, list(model.parameters()), *self.train[me])
            tuned = copy.deepcopy(model)
            self.fit(tuned, list(tuned.parameters())[-DEPTH_TENSORS:], *self.train[me])
            if self.loss(tuned, *self.valid[me]) < self.loss(model, *self.valid[me]):
                self.models[me] = tuned

    def fit(self, model: nn.Module, params: list[nn.Parameter], x: torch.Tensor, y: torch.Tensor) -> None:
        for param in model.parameters():
            param.requires_grad_(any(param is mine for mine in params))
        optimiser = torch.optim.Adam(params, lr=RATE)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(y)).split(BATCH):
                optimiser.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()

    @torch.no_grad()
    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        parts = [cross_entropy(model(a), b, reduction="sum") for a, b in zip(x.split(128), y.split(128), strict=True)]
        return float(torch.stack(parts).sum() / len(y))


def ours(experiment: Experiment, name: str, folder: Path) -> Callable[[], None]:
    """A round after the other on one engine."""
    engine, recorder = make_engine(name, experiment.task), open_recorder(folder, experiment, {})
    state: list[RunState] = [first_state(experiment)]

    def play() -> None:
        state[0] = play_round(experiment, engine, state[0], recorder)[0]

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("clients", 50), ("samples", 250), ("epochs", 3), ("repeat", 3), ("threads", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    experiment = prepare(args.clients, args.samples, args.epochs)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"plain loops": Plain(experiment).play}
        for name in ("stacked", "processes"):
            (Path(folder) / name).mkdir()
            contenders[name] = ours(experiment, name, Path(folder) / name)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.repeat):
            for name, play in contenders.items():
                begin = time.perf_counter()
                play()
                times[name].append(time.perf_counter() - begin)
                print(f"{name:12s} {times[name][-1]:7.2f} s", flush=True)
    plain = statistics.median(times["plain loops"])
    print(
        f"{args.clients} clients, {args.samples} samples, {args.epochs} epochs, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, seconds in times.items():
        print(
            f"{name:12s} median {statistics.median(seconds):7.2f} s   {plain / statistics.median(seconds):5.2f} times as fast as plain loops"
        )


if __name__ == "__main__":
    main()
