"""How long and how large a plan's runs will be, from arithmetic alone: what `--plan` prints. Rough
on purpose, and said to be so.

The work of a run is that of its local steps, its server's steps and its evaluations, in operations
of the network on one example, counted by torch on tensors without content. Speeds are what we
measured on two cores and take for one H200; within a factor of three is what to expect.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remanence.config import Experiment
from remanence.core import expressions
from remanence.data.downloads import download_hint
from remanence.recipes.plan import ResultPlan, source_of

# source -> shape, classes, training rows, test rows, as published
FACTS: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "cifar10": ((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": ((3, 32, 32), 100, 50_000, 10_000),
    "cinic10": ((3, 32, 32), 10, 90_000, 90_000),
    "digits": ((1, 8, 8), 10, 1_438, 359),
    "emnist": ((1, 28, 28), 62, 697_932, 116_323),
    "fashion_mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "femnist": ((1, 28, 28), 62, 724_000, 81_000),
    "mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "mnist_by_writer": ((1, 28, 28), 10, 54_000, 6_000),
    "pacs": ((3, 227, 227), 7, 7_993, 1_998),
    "svhn": ((3, 32, 32), 10, 73_257, 26_032),
}
# how many times a plain step a method's step costs, by what it computes besides
STEPS = {
    "fedntd": 4 / 3,
    "flashback": 4 / 3,
    "moon": 5 / 3,
    "fedreg": 6.0,
    "hast": 2.0,
    "centralized": 5 / 3,
    "fedwavg": 1.1,
    "scaffold": 1.1,
}
DECENTRALISED = ("random", "dac", "hast", "oracle", "local")
# methods in which every client keeps something as large as a model
KEEPS_MODEL = ("scaffold", "fedwavg", "moon", *DECENTRALISED)


@dataclass(frozen=True)
class Machine:
    """What a computer makes of it."""

    name: str
    speed: Mapping[str, float]  # operations a second in training, by precision
    layer: float  # seconds that one layer takes in one step at least, forward and backward
    stacked: bool  # are a round's clients one computation?


# a round of ten ResNet-18 took .56 s in tf32 and .31 to .37 in bf16, one of ten CNNs 18 ms in tf32:
# benchmarks/README.md
H200 = Machine("one H200", {"fp64": 5e12, "fp32": 3e13, "tf32": 1e14, "bf16": 1.6e14}, 6e-5, True)
TWO_CORES = Machine("two cores", dict.fromkeys(H200.speed, 4e10), 6e-5, False)


COMPILING = 30.0  # seconds on a GPU, at the start of a run for which it pays


@dataclass(frozen=True)
class Cost:
    """Seconds on both machines, and bytes of memory."""

    cpu: float
    gpu: float
    memory: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.gpu + other.gpu, max(self.memory, other.memory))


def estimate(specs: Iterable[Experiment]) -> Cost:
    """The cost of runs, one after the other."""
    return sum((estimate_run(spec) for spec in specs), Cost(0.0, 0.0, 0))


def describe_plan(plan: ResultPlan) -> str:
    """Runs, rounds, time and memory in words, without running anything."""
    recipe, made = plan.recipe, plan.scale_settings
    lines = [
        f"{recipe.name}: {recipe.title}",
        f"scale {plan.scale}: {made.about or 'as published'}",
    ]
    for run in plan.runs:
        cost = estimate_run(run.spec)
        seed = f", seed {run.seed}" if len(plan.seeds) > 1 else ""
        setting = f", {run.setting}" if run.setting else ""
        substitute_data = (
            f" [{source_of(run.spec)} as stand-in for {run.substitute}]" if run.substitute else ""
        )
        lines.append(
            f"  {run.row}, {run.column}{setting}{seed}{substitute_data}: {run.spec.total_rounds}"
            f" rounds, {_describe_time(cost)}"
        )
    used = {source_of(run.spec) for run in plan.runs}
    for source in sorted(
        {place.missing_data for place in plan.places.values() if place.missing_data}
    ):
        lines.append(
            f"  {'first of all' if source in used else 'left out'}, {source} is not in the"
            f" data folder: {download_hint(source)}"
        )
    total = estimate(run.spec for run in plan.runs)
    rounds = sum(run.spec.total_rounds for run in plan.runs)
    lines.append(
        f"{len(plan.runs)} runs, {rounds} rounds in all: {_describe_time(total)}; about"
        f" {total.memory / 1e9:.1f} GB of memory"
    )
    lines.append("an estimate from the arithmetic of the networks, good to a factor of three")
    return "\n".join(lines)


def _describe_time(cost: Cost) -> str:
    return f"about {readable(cost.cpu)} on {TWO_CORES.name}, {readable(cost.gpu)} on {H200.name}"


def readable(seconds: float) -> str:
    """A time that nobody takes for exact.

    >>> readable(0.4), readable(50), readable(500), readable(50_000), readable(1e7)
    ('a second', '50 seconds', '8 minutes', '14 hours', '116 days')
    """
    for unit, name, limit in (
        (1, "second", 90),
        (60, "minute", 90),
        (3600, "hour", 48),
        (86400, "day", math.inf),
    ):
        count = max(1, round(seconds / unit))
        if seconds < limit * unit:
            return f"a {name}" if count == 1 else f"{count} {name}s"
    raise AssertionError("every time is shorter than forever")


def estimate_run(spec: Experiment) -> Cost:
    shape, classes, train, test = _facts(spec)
    network = _measure_network(spec.model, source_of(spec), shape, classes)
    clients = _clients(spec)
    cohort = clients if spec.clients.sample is None else spec.clients.sample
    cohort = max(1, round(cohort * clients)) if isinstance(cohort, float) else cohort
    names = {call.name for call in expressions.parse_parts(spec.method)}
    personal = bool(names & set(DECENTRALISED))
    if personal:
        cohort = clients
    rows = _rows_of_client(spec, train, clients)
    steps = spec.local.steps or spec.local.epochs * math.ceil(rows / spec.local.batch_size)
    trained = cohort * (spec.local.steps * spec.local.batch_size or spec.local.epochs * rows)
    factor = math.prod(STEPS.get(name, 1.0) for name in names)
    server_steps, server_rows = _server_work(spec)
    rounds = spec.total_rounds
    looks = rounds / spec.record.every + spec.drift.time_steps
    judged = test * (clients / max(1, _clusters(spec)) if personal else 1)
    judged += (train * float(spec.data.validation) if spec.record.validation else 0) + (
        cohort * test if spec.record.local else 0
    )
    judged += 3 * cohort * rows if spec.record.examples else 0
    work = network.operations * (3 * rounds * (factor * trained + server_rows) + looks * judged)
    seconds = []
    for machine in (TWO_CORES, H200):
        calls = steps * (1 if machine.stacked else cohort) * factor + server_steps
        training = (
            work / machine.speed[spec.precision]
            + rounds * calls * network.layers * machine.layer
            + rounds * 0.005
        )
        seconds.append(training + (min(training, COMPILING) if machine.stacked else 0))
    kept = clients if names & set(KEEPS_MODEL) else 0
    memory = 4 * network.parameters * (
        4 * cohort + 2 * kept + 8
    ) + 4 * 3 * network.activations * min(spec.local.batch_size, rows) * min(cohort, 64)
    # torch itself
    return Cost(seconds[0], seconds[1], memory + (train + test) * math.prod(shape) + 600_000_000)


@dataclass(frozen=True)
class Network:
    """What one example costs."""

    operations: float  # forward
    parameters: int
    activations: int  # numbers kept for the backward pass
    layers: int


@functools.lru_cache(maxsize=64)
def _measure_network(model: str, source: str, shape: tuple[int, ...], classes: int) -> Network:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from remanence.experiment.build import build_module
    from remanence.models import default_model

    with torch.device("meta"):
        module = build_module(
            model or default_model("image" if len(shape) == 3 else "table", source, shape),
            shape,
            classes,
        ).eval()
        sizes: list[int] = []
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(lambda layer, given, out: sizes.append(out.numel()))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, *shape))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Network(
        max(float(counter.get_total_flops()), 2.0 * parameters), parameters, sum(sizes), len(sizes)
    )


def _facts(spec: Experiment) -> tuple[tuple[int, ...], int, int, int]:
    call = expressions.parse_call(spec.data.name)
    shape, classes, train, test = FACTS.get(call.name, ((32,), 10, 8_000, 2_000))
    if call.name == "pacs" and "size" in call.arguments:
        shape = (3, int(call.arguments["size"]), int(call.arguments["size"]))
    if call.name == "synthetic":
        train = int(0.8 * int(call.arguments.get("samples", 10_000)))
    return shape, classes, train, test


def _clients(spec: Experiment) -> int:
    call = expressions.parse_call(spec.data.partition)
    if call.name == "label_clusters" and not spec.drift.schedule:
        return sum(int(count) for count in str(call.arguments.get("clients", "2:3:4")).split(":"))
    return spec.clients.count or 10


def _rows_of_client(spec: Experiment, train: int, clients: int) -> int:
    if spec.drift.schedule and spec.drift.samples:
        return spec.drift.samples
    samples = (
        expressions.parse_call(spec.data.partition).arguments.get("samples")
        or (train - spec.data.public) // clients
    )
    return max(1, round(int(samples) * (1 - float(spec.data.validation))))


def _clusters(spec: Experiment) -> int:
    return (
        int(expressions.parse_call(spec.drift.schedule).arguments.get("clusters", 1))
        if spec.drift.schedule
        else 1
    )


def _server_work(spec: Experiment) -> tuple[int, int]:
    """Steps and examples of a round at the server."""
    for call in expressions.parse_parts(spec.method):
        if call.name == "feddf":
            steps, batch = (
                int(call.arguments.get("steps", 10_000)),
                int(call.arguments.get("batch", 128)),
            )
            return steps, steps * min(batch, spec.data.public)
        if call.name == "flashback":
            epochs = int(call.arguments.get("server_epochs", 5))
            return epochs * math.ceil(
                spec.data.public / spec.local.batch_size
            ), epochs * spec.data.public
    return 0, 0
