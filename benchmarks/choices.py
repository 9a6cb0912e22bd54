"""Is `engine = "auto"` right? Its choice beside the best one, for short and long commands with one
run and with ten methods.

    python benchmarks/choices.py [--networks mlp,lenet,cnn] [--device cpu] [--precision fp32]
    [--verify 2] [--minutes 3] [--json FILE]

Every way in which `auto` could run a network is measured once, from an empty compiler cache:
seconds to start, and seconds a local step. From these numbers follow the time of each command with
each of them, and what `auto` would do, with the time that its own trials take. `--verify` commands,
the longest ones that `--minutes` allow, are then run for real: once with `auto`, once with the best
choice, both with a warm cache.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import remanence as rem
from remanence.bench.jobs import CNN, HAST, RESNET
from remanence.bench.machine import about_machine
from remanence.config import parse_experiment
from remanence.core.engine import ClientWork
from remanence.core.errors import InputError
from remanence.core.process_state import preserve_process_state
from remanence.core.progress import duration
from remanence.engines import autotune
from remanence.engines.autotune import Candidate, Trials, choose_engine
from remanence.engines.cost import FOUND_AGAIN, Timing, Workload
from remanence.engines.processes import count_cores
from remanence.engines.vectorized import MAX_STACK
from remanence.experiment.build import BuiltExperiment, build
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state

DIGITS = {
    "data.name": "digits",
    "data.validation": 0,
    "record.personal": 0,
    "record.every": 1_000,
    "clients.count": 20,
    "clients.sample": 5,
    "model": "mlp(hidden=32)",
}
NETWORKS: dict[str, Mapping[str, Any]] = {
    "mlp": DIGITS,
    "lenet": HAST,
    "cnn": CNN,
    "resnet18": RESNET | {"model": "resnet18(norm='mixed')"},
}
WORKLOADS = tuple(
    Workload(rounds * runs, runs, runs) for runs in (1, 10) for rounds in (5, 50, 500, 5_000)
)
# `auto` may take WITHIN times as long as the best choice, or WITHIN_S seconds longer: its trials
# take a second.
WITHIN, WITHIN_S = 1.15, 1.0


def is_right(cell: Cell) -> bool:
    return cell.chosen_s <= max(WITHIN * cell.best_s, cell.best_s + WITHIN_S)


class Measured(NamedTuple):
    """A network, and all ways of running it."""

    network: str
    timings: dict[Candidate, Timing]
    steps: int  # local steps of a round, of all clients
    experiment: BuiltExperiment
    work: ClientWork


class Cell(NamedTuple):
    """A command: the best choice and that of `auto`, in seconds of local training."""

    network: str
    workload: Workload
    best: Candidate
    best_s: float
    chosen: Candidate
    chosen_s: float
    trials_s: float


def measure_network(name: str, device: str, precision: str) -> Measured:
    """Measure all candidates, each with an empty cache."""
    settings = {**NETWORKS[name], "device": device, "precision": precision, "engine": "auto"}
    experiment = build(parse_experiment({}, settings))
    work = make_work(experiment, first_state(experiment), 1)
    if experiment.task.info.device.type == "cpu":
        torch.set_num_threads(1)
    trials = Trials(experiment.task, work, work, 0, time.perf_counter, Workload())
    for candidate in candidates_of(experiment):
        print(f"  {candidate}", flush=True)
        with (
            tempfile.TemporaryDirectory() as cache,
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}),
        ):
            torch.compiler.reset()
            trials.run(candidate, autotune.LONG_TRIAL_STEPS)
    return Measured(name, trials.timings, trials.steps, experiment, work)


def candidates_of(experiment: BuiltExperiment) -> list[Candidate]:
    """All that `auto` could take for a task, the simplest first."""
    cuda, convolutions = (
        experiment.task.info.device.type == "cuda",
        experiment.task.model.has_convolutions,
    )
    if cuda:
        engines = [Candidate("vectorized", MAX_STACK["cuda"])]
    elif convolutions and count_cores() > 1:
        engines = [Candidate("processes", 1)]
    else:
        engines = [
            Candidate("vectorized", MAX_STACK["cpu"]),
            Candidate("processes", autotune.WORKER_STACK),
        ]
    plain = [Candidate("sequential")]
    return plain + [
        engine._replace(execution=execution)
        for execution in autotune.EXECUTIONS
        for engine in engines
    ]


def from_scratch(timing: Timing, steps: int, workload: Workload) -> float:
    """Seconds of a command that takes this way without any trial."""
    first = (1 - FOUND_AGAIN) * timing.start_s if timing.compiles else 0.0
    return first + timing.total_s(steps * workload.rounds, workload)


def decide(measured: Measured, workload: Workload) -> Cell:
    """What `auto` would do for a command, by its own rules and the measured numbers."""
    spent = 0.0
    timings = measured.timings

    def measure(make: Any, work: ClientWork, clock: Any, times: int) -> tuple[float, float]:
        seconds = timings[Candidate("sequential")].step_s
        return seconds, seconds

    def run(trials: Trials, candidate: Candidate, steps: int) -> None:
        nonlocal spent
        if candidate not in timings:
            raise InputError(f"{candidate} was not measured")
        timing = timings[candidate]
        spent += (
            timing.start_s + 2 * steps * len(trials.clients_for(candidate).clients) * timing.step_s
        )
        trials.timings[candidate] = timing

    with (
        mock.patch.object(autotune, "measure", measure),
        mock.patch.object(Trials, "run", run),
        preserve_process_state(),
    ):
        choice = choose_engine(measured.experiment.task, measured.work, workload=workload)
    chosen = next(
        each
        for each in timings
        if (each.name, each.execution) == (choice.name, choice.execution)
        and (each.name != "processes" or each.stack == choice.stack)
    )
    costs = {
        each: from_scratch(timing, measured.steps, workload) for each, timing in timings.items()
    }
    best = min(costs, key=lambda each: costs[each])
    after = timings[chosen].total_s(measured.steps * workload.rounds, workload)
    return Cell(measured.network, workload, best, costs[best], chosen, spent + after, spent)


def verify(cell: Cell, device: str, precision: str) -> tuple[float, float]:
    """Seconds of the command with `auto` and with the best choice."""
    settings = {**NETWORKS[cell.network], "device": device, "precision": precision}
    rounds = cell.workload.rounds // cell.workload.runs
    methods = [
        "fedavg",
        *(f"fedprox(mu={number / 100})" for number in range(1, cell.workload.runs)),
    ]
    ways: list[dict[str, Any]] = [
        {"engine": "auto"},
        {"engine": cell.best.name, "execution": cell.best.execution}
        | ({"threads": 1} if device != "cuda" else {})
        | ({"stack_size": cell.best.stack} if cell.best.name == "processes" else {}),
    ]
    seconds = []
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            rem.compare(
                methods, set=settings | way | {"rounds": rounds}, out=Path(folder, "c"), quiet=True
            )
            seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def table(cells: Sequence[Cell]) -> str:
    lines = [
        "| network | rounds | runs | best choice | local training | auto | with its trials | ratio |",
        "|---|--:|--:|---|--:|---|--:|--:|",
    ]
    for cell in cells:
        runs, ratio = cell.workload.runs, cell.chosen_s / cell.best_s
        lines.append(
            f"| {cell.network} | {cell.workload.rounds // runs} | {runs} | {cell.best}"
            f" | {seconds_text(cell.best_s)} | {cell.chosen} | {seconds_text(cell.chosen_s)}"
            f" | {ratio:.2f}{'' if is_right(cell) else ' (!)'} |"
        )
    return "\n".join(lines)


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def to_verify(cells: Sequence[Cell], count: int, limit_s: float) -> list[Cell]:
    """The longest commands that fit, each of another network where possible."""
    fitting = sorted((c for c in cells if c.best_s <= limit_s), key=lambda c: -c.best_s)
    first = list({cell.network: cell for cell in reversed(fitting)}.values())
    rest = [cell for cell in fitting if cell not in first]
    return (sorted(first, key=lambda c: -c.best_s) + rest)[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--networks", default="lenet,cnn,resnet18" if cuda else "mlp,lenet,cnn")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--verify", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=3.0, help="the longest verified command")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    names = options.networks.split(",")
    if unknown := [name for name in names if name not in NETWORKS]:
        parser.error(f"unknown network {unknown[0]}: known are {', '.join(NETWORKS)}")
    cells: list[Cell] = []
    for name in names:
        print(f"{name}:", flush=True)
        measured = measure_network(name, options.device, options.precision)
        for candidate, timing in measured.timings.items():
            print(f"  {candidate}: start {timing.start_s:.2f} s, step {1e3 * timing.step_s:.3f} ms")
        cells += [decide(measured, workload) for workload in WORKLOADS]
    machine = about_machine(measured.experiment, 1)
    print(f"\n{machine['device']}, {options.precision}\n\n{table(cells)}")
    print(
        f"\n{sum(map(is_right, cells))} of {len(cells)} within {WITHIN - 1:.0%} or"
        f" {WITHIN_S:g} s of the best choice"
    )
    for cell in to_verify(cells, options.verify, 60 * options.minutes):
        automatic, best = verify(cell, options.device, options.precision)
        rounds = cell.workload.rounds // cell.workload.runs
        print(
            f"run for real: {cell.network}, {cell.workload.runs} x {rounds} rounds: auto"
            f" {automatic:.1f} s, {cell.best} {best:.1f} s, ratio {automatic / best:.2f}",
            flush=True,
        )
    if options.json:
        entries = [
            {"network": c.network, "best": str(c.best), "chosen": str(c.chosen)}
            | c.workload._asdict()
            | {"best_s": c.best_s, "chosen_s": c.chosen_s, "trials_s": c.trials_s}
            for c in cells
        ]
        options.json.write_text(json.dumps({"machine": machine, "cells": entries}, indent=1))


if __name__ == "__main__":
    main()
