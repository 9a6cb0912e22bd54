"""The same job on every engine: seconds a round and what they are spent on, and the bytes that an
engine sends to its workers and receives from them.

    python benchmarks/engines.py [--engines sequential,vectorized,processes,ray,flower]
    [--clients 20] [--rounds 5] [--workers 2] [--model lenet]

FedAvg and HAST with all clients in every round and one local epoch, on synthetic images for lenet
and on the digits for mlp. The first round, which starts workers and sends them the data, is listed
separately; the median of the others counts. Ray starts a cluster on this machine; `--address` uses
a running one. Flower starts a SuperLink with TLS and authentication and as many sites as there are
workers, each with its part of the clients. Its seconds a round come from the run's metrics, and the
time a site works on a reply (listed as training) and the mean bytes a round from the last line of
its log. An engine whose package is missing is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.connection
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.config import RaySettings, parse_experiment, write_toml
from remanence.core import pytree
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.engines.base import BaseEngine
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment, build
from remanence.rounds.setup import first_state, make_round

METHODS = ("fedavg", "hast(peers=3, finetune_epochs=1)")
DATA = {"lenet": "synthetic(samples=2500, classes=10, shape='1x28x28', test=0.2)", "mlp": "digits"}

# of a federation's run, in its last line
END = re.compile(r"(\d+) bytes of arrays sent to sites, (\d+) received.* worked ([\d.]+) s")


class Spent(NamedTuple):
    """One round, in seconds and bytes."""

    whole: float
    train: float
    score: float
    down: int
    up: int


class Stopwatch(BaseEngine):
    """Adds up how long the calls of an engine take."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine, self.name, self.execution = engine, engine.name, engine.execution
        self.seconds = {"train": 0.0, "score": 0.0}

    def train(self, work: Any) -> Iterator[Any]:
        replies = self.engine.train(work)
        while True:  # only the engine's own time: between replies the round loop is at work
            begin = time.perf_counter()
            reply = next(replies, None)
            self.seconds["train"] += time.perf_counter() - begin
            if reply is None:
                return
            yield reply

    def score(self, *args: Any, **settings: Any) -> Any:
        return self._timed(self.engine.score, *args, **settings)

    def score_pairs(self, *args: Any, **settings: Any) -> Any:
        return self._timed(self.engine.score_pairs, *args, **settings)

    def predict_logits(self, *args: Any, **settings: Any) -> Any:
        return self._timed(self.engine.predict_logits, *args, **settings)

    def _timed(self, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **settings)
        finally:
            self.seconds["score"] += time.perf_counter() - begin

    def close(self) -> None:
        self.engine.close()


class Pipes:
    """Counts the bytes that this process writes to and reads from pipes, by which `processes`
    communicates with its workers.
    """

    def __init__(self) -> None:
        self.down = self.up = 0
        kind: Any = multiprocessing.connection.Connection
        send, receive = kind._send_bytes, kind._recv_bytes

        def count_sent(connection: Any, content: Any) -> Any:
            self.down += len(content)
            return send(connection, content)

        def count_received(connection: Any, largest: Any = None) -> Any:
            content = receive(connection, largest)
            self.up += content.getbuffer().nbytes
            return content

        kind._send_bytes, kind._recv_bytes = count_sent, count_received


def settings_of(method: str, model: str, clients: int) -> dict[str, Any]:
    return {
        "method": method,
        "model": model,
        "data.name": DATA[model],
        "data.partition": "dirichlet(alpha=1.0)",
        "clients.count": clients,
        "local.optimizer": "sgd(lr=0.05)",
        "rounds": 1000,
        "record.every": 1000,
        "record.validation": False,
        "device": "cpu",
    }


def run_with_sites(settings: dict[str, Any], rounds: int, sites: int) -> list[Spent]:
    """The same with processes of Flower: a SuperLink, a coordinator and sites."""
    from remanence.flower.app_files import write_app
    from remanence.flower.processes import Federation
    from remanence.flower.quickstart import follow_log, write_site

    config = parse_experiment({}, settings | {"engine": "flower", "rounds": rounds + 1})
    clients = np.array_split(np.arange(config.clients.count), sites)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiment.toml").write_text(write_toml(config, {}))
        write_app(folder / "app", [folder / "experiment.toml"], name="bench")
        federation = Federation(
            folder, secure=True, environment={"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        )
        try:
            federation.start()
            for number, ids in enumerate(clients):
                label = f"site-{number}"
                federation.add_site(
                    label, write_site(folder / label, label, range(int(ids[0]), int(ids[-1]) + 1))
                )
            log: list[str] = []
            follow_log(federation, federation.run(folder / "app", name="run"), log.append)
        finally:
            federation.stop()
        (written,) = (folder / "runs").glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in written.read_text().splitlines()]
    found = END.search(log[-1])
    if found is None:
        raise RuntimeError(f"the run did not end well: {log[-1]}")
    down, up, worked = (float(number) for number in found.groups())
    by_round = {line["round"]: line["seconds"] for line in lines}
    return [
        Spent(seconds, worked, 0.0, int(down / len(by_round)), int(up / len(by_round)))
        for seconds in by_round.values()
    ]


def measure(experiment: BuiltExperiment, engine: Engine, rounds: int, pipes: Pipes) -> list[Spent]:
    """Consecutive rounds, as in a run."""
    watch, state, spent = Stopwatch(engine), first_state(experiment), []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(make_round(experiment, watch, Path(folder))) as round,
    ):
        for _ in range(rounds + 1):
            watch.seconds = dict.fromkeys(watch.seconds, 0.0)
            before = count_traffic(engine, pipes)
            begin = time.perf_counter()
            state, _ = round.run(state)
            whole = time.perf_counter() - begin
            down, up = (
                after - earlier
                for after, earlier in zip(count_traffic(engine, pipes), before, strict=True)
            )
            spent.append(Spent(whole, watch.seconds["train"], watch.seconds["score"], down, up))
    return spent


def count_traffic(engine: Engine, pipes: Pipes) -> tuple[int, int]:
    traffic = getattr(engine, "traffic", None)
    return (pipes.down, pipes.up) if traffic is None else (traffic.down, traffic.up)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="sequential,vectorized,processes,ray,flower")
    parser.add_argument("--model", default="lenet", choices=sorted(DATA))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipes = Pipes()
    for method in METHODS:
        settings = settings_of(method, options.model, options.clients)
        experiment = build(parse_experiment({}, settings))
        one = pytree.nbytes(experiment.task.model.initial.params)
        print(
            f"\n{method}, {options.model} of {one / 1e6:.2f} MB, {options.clients}"
            f" clients, {options.workers} workers, {platform.processor() or 'CPU'}\n"
        )
        print(
            "| engine | first round, s | s a round | training | scoring | the rest | MB to"
            " workers | MB from workers |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name in options.engines.split(","):
            try:
                if name == "flower":
                    first, *others = run_with_sites(settings, options.rounds, options.workers)
                else:
                    engine = make_engine(
                        name,
                        experiment.task,
                        workers=options.workers,
                        ray=RaySettings(address=options.address),
                    )
                    with contextlib.closing(engine):
                        first, *others = measure(experiment, engine, options.rounds, pipes)
            except (InputError, ImportError) as missing:
                print(f"| {name} | left out: {missing} |")
                continue
            middle = Spent(*(statistics.median(column) for column in zip(*others, strict=True)))
            rest = middle.whole - middle.train - middle.score
            bytes_ = (
                "– | –"
                if name in ("sequential", "vectorized")
                else f"{middle.down / 1e6:.2f} | {middle.up / 1e6:.2f}"
            )
            parts = " | ".join(f"{seconds:.2f}" for seconds in (middle.train, middle.score, rest))
            print(
                f"| `{name}` | {first.whole:.2f} | {middle.whole:.2f} | {parts} | {bytes_} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
