"""Eager and captured steps on the GPU against `sequential` on the CPU, in float64: every part of
the registry, every setting, and parts that fill every slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from engines.test_equal_engines import CASES, EVERYTHING, with_clients
from engines.toys import TOYS
from gpu.cases import (
    Case,
    compare_runs,
    compare_with_sequential,
    counted,
    difference,
    on_cpu,
    without_tracing,
)
from torch import Tensor, nn

from remanence.core.contexts import ClientOps, Context
from remanence.core.model import init_module
from remanence.core.pytree import Tree
from remanence.core.rng import Key
from remanence.core.slots import Method, Part, StepTracker
from remanence.core.types import Batch, ModelState, Output
from remanence.engines import captured_steps
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.kernels import capture
from remanence.methods import PARTS
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import check_engine
from remanence.testing.toy_task import fast_config, run_rounds, small_experiment
from remanence.training import server_capture

# ten clients in a round, which is what the robust aggregations need
IMAGES = {
    "data.name": "synthetic(samples=100, classes=4, shape='2x6x6', test=0.25)",
    "data.partition": "quantity(power=1, minimum=1)",
    "clients.count": 12,
    "clients.sample": 10,
}
EXECUTIONS = ("eager", "captured")
# the server takes steps that are worth capturing
SERVER_METHODS = (
    "flashback(server_epochs=4)",
    "feddf(steps=12, patience=12, batch=4, validation=0.25, lr=1e-05)",
)


class SmallCnn(nn.Module):
    """2x6x6 images -> 4 maps, normalized and pooled to 3x3 -> 4 classes"""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Linear(36, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        maps = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        logits: Tensor = self.head(maps.flatten(1))
        return logits


def images(method: str | Method | Part, device: str, **changes: Any) -> BuiltExperiment:
    """A method on small images, with clients of 17 to 2 examples."""
    return small_experiment(
        method, {**IMAGES, **changes, "device": device}, module=init_module(SmallCnn, Key(0))
    )


def setting(name: str, device: str) -> BuiltExperiment:
    changes, make_module = CASES[name]
    torch.manual_seed(0)  # its layers draw their weights from torch's generator
    module = None if make_module is None else make_module()
    return small_experiment(EVERYTHING, {**changes, "device": device}, module=module)


def toy(name: str, device: str) -> BuiltExperiment:
    return small_experiment(TOYS[name](), {"device": device})


def check_contract(execution: str, device: str) -> float:
    """`check_engine`; it raises an AssertionError above its own tolerance."""
    with without_tracing(device):
        check_engine(lambda task: VectorizedEngine(task, 3, execution), device=device)
    return 0.0


def remembers_last_step() -> Part:
    """A part that hands on the parameters before a step under another name: they lie where the new
    ones are about to be written.
    """

    def tell(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        last = ctx.tracker_state["last"]
        return {}, {"moved": {name: x - last[name] for name, x in trained.params.items()}}

    return Part(
        "last_step",
        step_tracker=StepTracker(
            lambda ctx, ops: {"last": dict(ctx.start.params)},
            lambda memory, before, after, batch, ops, ctx: {"last": dict(before.params)},
        ),
        on_client_end=tell,
        payload=lambda start, info: {"moved": start.params},
        payload_description="the last step",
    )


def last_step(execution: str, device: str) -> float:
    """What a client's last step changed, which is zero where the memory was overwritten too soon."""

    def moved(engine: Any, experiment: BuiltExperiment) -> Tree:
        found: Tree = {}
        for reply in engine.train(make_work(experiment, first_state(experiment), 1)):
            sent = on_cpu(reply.payload["last_step"]["moved"])
            for row, client in enumerate(reply.client.tolist()):
                found[str(client)] = {name: x[row] for name, x in sent.items()}
        return found

    reference = small_experiment(remembers_last_step())
    expected = moved(SequentialEngine(reference.task), reference)
    assert all(float(x.abs().max()) > 0 for tree in expected.values() for x in tree.values())
    experiment = small_experiment(remembers_last_step(), {"device": device})
    engine = VectorizedEngine(experiment.task, 64, execution)
    with without_tracing(device), counted(captured_steps, "copy_tensors") as copies:
        found = moved(engine, experiment)
    assert engine.degraded_reason == "", engine.degraded_reason
    assert copies, "copy_tensors was not reached"
    return difference(found, expected, what="the last step")


def visits_the_host() -> Part:
    """A part whose steps copy a tensor to the host, which CUDA forbids while it captures."""

    def term(out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
        return 0.1 * out.logits.square().sum(dim=1).cpu().to(out.logits.device)

    return Part("visits_the_host", loss_terms=(term,))


def failed_capture(device: str) -> float:
    """A capture that fails leaves the device usable: all steps run eagerly, with the reason."""
    reference, experiment = images(visits_the_host(), "cpu"), images(visits_the_host(), device)
    expected = run_rounds(reference, SequentialEngine(reference.task), 2)
    engine = VectorizedEngine(experiment.task, 64, "captured")
    with without_tracing(device):
        found = run_rounds(experiment, engine, 2)
    if device != "cpu":
        assert engine.execution == "eager"
        assert engine.degraded_reason.startswith("steps could not be captured (")
    return compare_runs(found, expected)


def swapped_tensors(device: str) -> float:
    """Two that change places, one that stays, one turned around, one that is new."""
    kept = [torch.arange(4.0).reshape(2, 2) + 10 * number for number in range(5)]
    a, b, c, d, e = (x.clone().to(device) for x in kept)
    capture.copy_tensors([a, b, c, d, e], [b, a, c, d.t(), e + 1])
    wanted = [kept[1], kept[0], kept[2], kept[3].t(), kept[4] + 1]
    return difference(
        {str(place): x for place, x in enumerate((a, b, c, d, e))},
        {str(place): x for place, x in enumerate(wanted)},
        tolerance=0.0,
    )


def many_clients(device: str) -> BuiltExperiment:
    """Twenty clients of 20 to 1 examples: above 16 there are fewer captured sizes than clients."""
    changes = {
        "data.name": "synthetic(samples=280, classes=4, features=5, test=0.25)",
        "data.partition": "iid",
        "local.batch_size": 1,
        "clients.count": 20,
        "device": device,
    }
    return with_clients(small_experiment(EVERYTHING, changes), list(range(1, 21)))


def many_steps(device: str) -> BuiltExperiment:
    """Clients of 8, 4, 3, 1 and 1 examples in batches of 1: with 3 clients left, the stack of 5 is
    masked.
    """
    changes = {"local.batch_size": 1, "data.partition": "iid", "device": device}
    return with_clients(small_experiment(EVERYTHING, changes), [3, 1, 8, 1, 4])


def masked_steps(device: str) -> float:
    with counted(
        captured_steps.CapturedPhase, "_capture", lambda phase, shape, compile: shape.masked
    ) as masked:
        largest = compare_with_sequential(many_clients, device, "captured", rounds=2)
    assert any(masked), "no captured step was masked"
    return largest


def server_steps(method: str, device: str) -> float:
    def make(device: str) -> BuiltExperiment:
        optimizer = "sgd(lr=0.05, momentum=0.5)"
        changes = {"data.public": 18, "local.optimizer": optimizer}
        return images(method, device, **changes)

    with counted(server_capture.CapturedServerSteps, "_capture") as captured:
        largest = compare_with_sequential(make, device, "captured")
    assert bool(captured) == (device != "cpu"), "the server's steps were not captured"
    return largest


def cases() -> Iterator[Case]:
    for execution in EXECUTIONS:
        for name in PARTS:
            make = partial(images, fast_config(name))
            yield Case(
                f"part {name}, {execution}",
                partial(compare_with_sequential, make, execution=execution, stack=3),
            )
        for name in CASES:
            yield Case(
                f"setting {name}, {execution}",
                partial(compare_with_sequential, partial(setting, name), execution=execution),
            )
        for name in TOYS:
            yield Case(
                f"slots {name}, {execution}",
                partial(compare_with_sequential, partial(toy, name), execution=execution),
            )
        yield Case(f"engine contract, {execution}", partial(check_contract, execution), 6)
    yield Case("state under another name, captured", partial(last_step, "captured"))
    yield Case("state under another name, compiled", partial(last_step, "compiled"), 15)
    yield Case("steps that cannot be captured", failed_capture)
    yield Case("tensors are read before they are overwritten", swapped_tensors, 1)
    yield Case("masked steps of 20 clients, captured", masked_steps, 8)
    for method in SERVER_METHODS:
        yield Case(f"server steps {method}", partial(server_steps, method))
