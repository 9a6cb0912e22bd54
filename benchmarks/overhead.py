"""The overhead of Remanence over the bare PyTorch steps: the engine `sequential` and a plain loop
take turns on one thread, in CPU seconds.

    python benchmarks/overhead.py [--jobs A,B] [--clients 8,3] [--turns 11]

`sequential` is the slowest engine, and the only one that takes the same steps as the plain loop.
`--clients` limits how many of a job's clients train, since a whole round takes long on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from remanence.bench.baselines import train_clients
from remanence.bench.jobs import JOBS, prepare
from remanence.bench.runner import interleave, train_ours
from remanence.engines.sequential import SequentialEngine


def measure(job: str, clients: int, turns: int) -> dict[str, list[float]]:
    """CPU seconds of every turn."""
    experiment, state, work = prepare(JOBS[job], "cpu", "fp32", {"clients.sample": clients})
    engine = SequentialEngine(experiment.task)
    contenders: dict[str, tuple[Callable[[], Any], int]] = {
        "sequential": (lambda: train_ours(experiment, state, work, engine), 1),
        "plain": (lambda: train_clients(experiment, state, work), 1),
    }
    return interleave(contenders, turns, experiment.task.info.device, time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", default="A,B")
    parser.add_argument("--clients", default="8,3")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args()
    for job, clients in zip(options.jobs.split(","), options.clients.split(","), strict=True):
        seconds = measure(job, int(clients), options.turns)
        for word, statistic in (("fastest", min), ("median", statistics.median)):
            ours, plain = (statistic(seconds[name]) for name in ("sequential", "plain"))
            print(
                f"{job}, {clients} clients, {word} of {options.turns}: loop {ours:.2f} s,"
                f" plain {plain:.2f} s: {100 * (ours / plain - 1):+.1f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
