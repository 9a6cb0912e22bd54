"""Estimates of the time and memory of a plan, as `--plan` prints them, without running anything.

The work of a run is that of its local steps, server steps and evaluations, in operations of the
network on one example, counted by torch on tensors without data. The speeds are measured on two
cores and assumed for one H200. Expect errors up to a factor of three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remanence.config import DEFAULT_PARTITION, Experiment
from remanence.core import expressions
from remanence.data.downloads import download_hint
from remanence.recipes.plan import ResultPlan, source_of

# shape, classes, training examples and test examples of a dataset, as published
DATA_SIZES: dict[str, tuple[tuple[int, ...], int, int, int]] = {
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
# cost of a step of a method, relative to a step of FedAvg
STEP_COST = {
    "fedntd": 4 / 3,
    "flashback": 4 / 3,
    "moon": 5 / 3,
    "fedreg": 6.0,
    "hast": 2.0,
    "centralized": 5 / 3,
    "fedwavg": 1.1,
    "scaffold": 1.1,
}
DECENTRALIZED = ("random", "dac", "hast", "oracle", "local")
# methods whose client state is as large as a model
KEEPS_MODEL = ("scaffold", "fedwavg", "moon", *DECENTRALIZED)


@dataclass(frozen=True)
class Machine:
    """The speed of a computer."""

    name: str
    speed: Mapping[str, float]  # operations per second in training, by precision
    layer: float  # minimum seconds of one layer in one step, forward and backward
    stacked: bool  # whether the clients of a round are trained in one batched computation


# Measured: a round of ten ResNet-18 takes 0.56 s in tf32 and 0.31 to 0.37 s in bf16, one of ten
# CNNs 18 ms in tf32 (benchmarks/README.md).
H200 = Machine("one H200", {"fp64": 5e12, "fp32": 3e13, "tf32": 1e14, "bf16": 1.6e14}, 6e-5, True)
TWO_CORES = Machine("two cores", dict.fromkeys(H200.speed, 4e10), 6e-5, False)


COMPILING = 30.0  # seconds on a GPU, at the start of a long run


@dataclass(frozen=True)
class Cost:
    """Seconds on both machines, and bytes of memory."""

    cpu: float
    gpu: float
    memory: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.gpu + other.gpu, max(self.memory, other.memory))


def estimate(experiments: Iterable[Experiment]) -> Cost:
    """Estimate the cost of runs, one after the other."""
    return sum((estimate_run(experiment) for experiment in experiments), Cost(0.0, 0.0, 0))


def describe_plan(plan: ResultPlan) -> str:
    """Describe the runs, rounds, time and memory of a plan, one line for each run."""
    recipe, settings = plan.recipe, plan.scale_settings
    lines = [
        f"{recipe.name}: {recipe.title}",
        f"scale {plan.scale}: {settings.description or 'as published'}",
    ]
    for run in plan.runs:
        cost = estimate_run(run.experiment)
        seed = f", seed {run.seed}" if len(plan.seeds) > 1 else ""
        setting = f", {run.setting}" if run.setting else ""
        substitute = (
            f" [{source_of(run.experiment)} as substitute for {run.substitute}]"
            if run.substitute
            else ""
        )
        lines.append(
            f"  {run.row}, {run.column}{setting}{seed}{substitute}: {run.experiment.total_rounds}"
            f" rounds, {_describe_time(cost)}"
        )
    used = {source_of(run.experiment) for run in plan.runs}
    for source in sorted({cell.missing_data for cell in plan.cells.values() if cell.missing_data}):
        lines.append(
            f"  {'required' if source in used else 'left out'}, {source} is not in the"
            f" data folder: {download_hint(source)}"
        )
    total = estimate(run.experiment for run in plan.runs)
    rounds = sum(run.experiment.total_rounds for run in plan.runs)
    lines.append(
        f"{len(plan.runs)} runs, {rounds} rounds in all: {_describe_time(total)}; about"
        f" {total.memory / 1e9:.1f} GB of memory"
    )
    lines.append("an estimate from the arithmetic of the networks, good to a factor of three")
    return "\n".join(lines)


def _describe_time(cost: Cost) -> str:
    return f"about {readable(cost.cpu)} on {TWO_CORES.name}, {readable(cost.gpu)} on {H200.name}"


def readable(seconds: float) -> str:
    """Format a rough time.

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
    raise AssertionError("the last limit is infinite")


def estimate_run(experiment: Experiment) -> Cost:
    """Estimate the cost of one run."""
    shape, classes, train, test = _data_size(experiment)
    network = _measure_network(experiment.model, source_of(experiment), shape, classes)
    clients = _clients(experiment)
    cohort = clients if experiment.clients.sample is None else experiment.clients.sample
    cohort = max(1, round(cohort * clients)) if isinstance(cohort, float) else cohort
    names = {call.name for call in expressions.parse_parts(experiment.method)}
    personal = bool(names & set(DECENTRALIZED))
    if personal:
        cohort = clients
    rows = _examples_of_client(experiment, train, clients)
    steps = experiment.local.steps or experiment.local.epochs * math.ceil(
        rows / experiment.local.batch_size
    )
    trained = cohort * (
        experiment.local.steps * experiment.local.batch_size or experiment.local.epochs * rows
    )
    factor = math.prod(STEP_COST.get(name, 1.0) for name in names)
    server_steps, server_rows = _server_work(experiment)
    rounds = experiment.total_rounds
    evaluations = rounds / experiment.record.every + experiment.drift.time_steps
    evaluated = test * (clients / max(1, _clusters(experiment)) if personal else 1)
    evaluated += train * float(experiment.data.validation) if experiment.record.validation else 0
    if experiment.record.local:
        every = experiment.record.local_every or experiment.record.every
        evaluated += cohort * test * experiment.record.every / every
    evaluated += 3 * cohort * rows if experiment.record.examples else 0
    work = network.operations * (
        3 * rounds * (factor * trained + server_rows) + evaluations * evaluated
    )
    seconds = []
    for machine in (TWO_CORES, H200):
        calls = steps * (1 if machine.stacked else cohort) * factor + server_steps
        training = (
            work / machine.speed[experiment.precision]
            + rounds * calls * network.layers * machine.layer
            + rounds * 0.005
        )
        seconds.append(training + (min(training, COMPILING) if machine.stacked else 0))
    stateful = clients if names & set(KEEPS_MODEL) else 0
    memory = 4 * network.parameters * (
        4 * cohort + 2 * stateful + 8
    ) + 4 * 3 * network.activations * min(experiment.local.batch_size, rows) * min(cohort, 64)
    data, torch_itself = (train + test) * math.prod(shape), 600_000_000
    return Cost(seconds[0], seconds[1], memory + data + torch_itself)


@dataclass(frozen=True)
class Network:
    """The cost of one example."""

    operations: float  # forward
    parameters: int
    activations: int  # numbers stored for the backward pass
    layers: int


@functools.lru_cache(maxsize=64)
def _measure_network(model: str, source: str, shape: tuple[int, ...], classes: int) -> Network:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from remanence.experiment.networks import build_module
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
                layer.register_forward_hook(lambda layer, inputs, out: sizes.append(out.numel()))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, *shape))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Network(
        max(float(counter.get_total_flops()), 2.0 * parameters), parameters, sum(sizes), len(sizes)
    )


def _data_size(experiment: Experiment) -> tuple[tuple[int, ...], int, int, int]:
    call = expressions.parse_call(experiment.data.name)
    shape, classes, train, test = DATA_SIZES.get(call.name, ((32,), 10, 8_000, 2_000))
    if call.name == "pacs" and "size" in call.arguments:
        shape = (3, int(call.arguments["size"]), int(call.arguments["size"]))
    if call.name == "synthetic":
        train = int(0.8 * int(call.arguments.get("samples", 10_000)))
    return shape, classes, train, test


def _clients(experiment: Experiment) -> int:
    call = expressions.parse_call(experiment.data.partition or DEFAULT_PARTITION)
    if call.name == "label_clusters" and not experiment.drift.schedule:
        return sum(int(count) for count in str(call.arguments.get("clients", "2:3:4")).split(":"))
    return experiment.clients.count or 10


def _examples_of_client(experiment: Experiment, train: int, clients: int) -> int:
    if experiment.drift.schedule and experiment.drift.samples:
        return experiment.drift.samples
    samples = (
        expressions.parse_call(experiment.data.partition or DEFAULT_PARTITION).arguments.get(
            "samples"
        )
        or (train - experiment.data.public) // clients
    )
    return max(1, round(int(samples) * (1 - float(experiment.data.validation))))


def _clusters(experiment: Experiment) -> int:
    return (
        int(expressions.parse_call(experiment.drift.schedule).arguments.get("clusters", 1))
        if experiment.drift.schedule
        else 1
    )


def _server_work(experiment: Experiment) -> tuple[int, int]:
    """Steps and examples of the server in a round."""
    for call in expressions.parse_parts(experiment.method):
        if call.name == "feddf":
            steps, batch = (
                int(call.arguments.get("steps", 10_000)),
                int(call.arguments.get("batch", 128)),
            )
            return steps, steps * min(batch, experiment.data.public)
        if call.name == "flashback":
            epochs = int(call.arguments.get("server_epochs", 5))
            return epochs * math.ceil(
                experiment.data.public / experiment.local.batch_size
            ), epochs * experiment.data.public
    return 0, 0
