"""Layers that a phase does not train are computed once: where a network can be cut, where
not, and that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remanence.core.model import Model, functionalize, init_module
from remanence.core.rng import Key
from remanence.core.slots import Method, Part, Phase
from remanence.core.types import ModelState, Reply
from remanence.engines.frozen_prefix import cut, find_split, inputs_only_feed_model
from remanence.engines.sequential import SequentialEngine
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.losses import tce
from remanence.methods import fedprox
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
    with_client_models,
)
from remanence.training.task import TrainingTask

IMAGES = {
    "data.name": "synthetic(samples=64, classes=4, shape='2x6x6', test=0.25)",
    "clients.sample": 6,
}
ROWS = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """2x6x6 images -> conv -> something in the middle -> a dense layer -> the head"""

    def __init__(self, middle: nn.Module | None = None):
        super().__init__()
        self.conv, self.middle = nn.Conv2d(2, 3, 3), nn.Identity() if middle is None else middle
        self.dense, self.head = nn.Linear(48, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.middle(self.conv(x)))
        logits: Tensor = self.head(torch.relu(self.dense(x.flatten(1))))
        return logits


class Mixing(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        logits: Tensor = self.head(self.dense((x - x.mean(dim=0)).flatten(1)))
        return logits


class Shortcut(Net):
    """The suffix needs the images, too."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dense(self.conv(x).flatten(1))) + x.flatten(1)[:, :4]
        return logits


class Deciding(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def pure(make: Callable[[], nn.Module]) -> Model:
    return functionalize(init_module(make, Key(0)), ROWS, 4, dtype=torch.float64)


def names_in(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


HEAD, DENSE = {"head.weight", "head.bias"}, {"dense.weight", "dense.bias"}


@pytest.mark.parametrize(
    ("middle", "trained", "rear"),
    [
        (None, HEAD, HEAD),
        (None, HEAD | DENSE, HEAD | DENSE),
        (None, DENSE, HEAD | DENSE),  # the head is not trained, but stands behind what is
        (lambda: nn.GroupNorm(3, 3), HEAD, HEAD),
        # another mask at every step: the cut is before it
        (lambda: nn.Dropout(0.5), HEAD, HEAD | DENSE),
        (lambda: nn.Dropout(0.0), HEAD, HEAD),
        # rows mix from there on
        (lambda: nn.BatchNorm2d(3), HEAD, HEAD | DENSE | {"middle.weight", "middle.bias"}),
    ],
)
def test_where_a_network_is_cut(
    middle: Callable[[], nn.Module] | None, trained: set[str], rear: set[str]
) -> None:
    model = pure(lambda: Net(middle() if middle else None))
    split = cut(model, trained, ROWS)
    assert split is not None
    assert names_in(split.trainable_suffix.train_module) == rear
    assert not names_in(split.frozen_prefix.eval_module) & rear
    key = torch.tensor(5)
    whole, _ = model.apply(*model.initial, ROWS, key)
    params, buffers = (split.suffix_params(tree) for tree in model.initial)
    pieces, _ = split.trainable_suffix.apply(
        params, buffers, split.features(model.initial, ROWS), key
    )
    assert torch.allclose(pieces.logits, whole.logits, atol=1e-14)
    # the tap at the head was carried over
    assert torch.allclose(pieces.features, whole.features, atol=1e-14)
    assert split.width == 8 * split.features(model.initial, ROWS)[0].numel()


@pytest.mark.parametrize(
    ("make", "trained"),
    [
        (Net, {"conv.bias", *HEAD}),  # the first layer is trained
        (Mixing, HEAD),  # a row's front would depend on the rows beside it
        (Shortcut, HEAD),  # two things cross the cut
    ],
)
def test_where_a_network_is_not_cut(make: Callable[[], nn.Module], trained: set[str]) -> None:
    assert cut(pure(make), trained, ROWS) is None


def test_a_network_that_cannot_be_traced_is_trained_whole() -> None:
    experiment = small_experiment("fedavg", IMAGES, module=init_module(Deciding, Key(0)))
    assert find_split(experiment.task, HEAD) is None


def test_which_parts_read_the_inputs() -> None:
    """Terms, gradients of their own, trackers and strangers' losses may; augmented inputs are
    others in every epoch.
    """

    def looks(method: str | Method | Part, **changes: Any) -> bool:
        return not inputs_only_feed_model(
            small_experiment(method, {**IMAGES, **changes}, module=init_module(Net, Key(0))).task
        )

    assert not looks("fedavg")
    assert not looks("fedavg+wsm")
    assert not looks(fedprox(mu=0.1) + tce())
    assert looks("fedavg", **{"data.augment": ("flip",)})
    assert looks("fedreg")
    assert looks(Part("projects", project=lambda params, batch, ops, ctx: params))
    assert looks("centralized")
    assert looks(
        Part("curious", loss_terms=(lambda out, batch, ops, ctx: batch.x.flatten(1).sum(dim=1),))
    )
    assert looks(
        Part(
            "stranger",
            loss=lambda out, batch, ctx: out.logits.sum(dim=1) * batch.x.flatten(1).sum(dim=1),
        )
    )


def tuning(phases: tuple[Phase, ...]) -> Part:
    return Part("tuning", phases=lambda phase: phases)


TWO_PHASES = (Phase(epochs=1), Phase(epochs=2, trainable=lambda world, names: tuple(sorted(HEAD))))


@pytest.mark.parametrize("middle", [None, lambda: nn.Dropout(0.5), lambda: nn.GroupNorm(3, 3)])
def test_the_numbers_are_the_same(middle: Callable[[], nn.Module] | None) -> None:
    """Full training, then two epochs of the head alone, in a loop and in stacks, with clients
    of very different sizes.
    """
    experiment = small_experiment(
        tuning(TWO_PHASES),
        IMAGES,
        module=init_module(lambda: Net(middle() if middle else None), Key(0)),
    )
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    for engine in (FastSequentialEngine(experiment.task), VectorizedEngine(experiment.task, 4)):
        state, _ = run_rounds(experiment, engine, 2)
        assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE


@pytest.mark.parametrize(
    "make",
    [
        lambda task: FastSequentialEngine(task, "captured"),
        lambda task: VectorizedEngine(task, 4, "captured"),
    ],
    ids=["sequential", "stack"],
)
def test_the_numbers_are_the_same_with_captured_steps(
    make: Callable[[TrainingTask], FastSequentialEngine | VectorizedEngine],
) -> None:
    """The second round has other examples and uses the same captured steps."""
    changes = IMAGES | {"data.partition": "dirichlet(alpha=0.5, samples=8)", "clients.sample": 3}
    experiment = small_experiment(tuning(TWO_PHASES), changes, module=init_module(Net, Key(0)))
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    engine = make(experiment.task)
    state, _ = run_rounds(experiment, engine, 2)
    assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE
    assert engine.degraded_reason == ""


def test_captured_steps_serve_rounds_of_fewer_and_smaller_clients() -> None:
    """Activations are laid into the memory of the first round's; clients of another length,
    rounded up, have captured steps of their own.
    """
    changes = IMAGES | {"data.partition": "quantity(power=0.3, minimum=1)"}
    experiment = small_experiment(tuning(TWO_PHASES), changes, module=init_module(Net, Key(0)))
    job = make_work(experiment, first_state(experiment), 1)
    engine, task = VectorizedEngine(experiment.task, 6, "captured"), experiment.task
    for places in ([0, 1, 2, 3, 4, 5], [1, 2, 4], [3, 5], [0, 5]):
        some = job.select(torch.tensor(places))
        mine, wanted = (
            Reply.concat(list(each.train(some))) for each in (engine, SequentialEngine(task))
        )
        mine = mine.select(torch.argsort(mine.client))
        assert (
            max_rel_diff(mine._asdict(), wanted.select(torch.argsort(wanted.client))._asdict())[1]
            <= TOLERANCE
        )
    assert engine.degraded_reason == ""
    assert [each.cached_features for each in engine.captured] == [False, True] * 2


def test_a_stack_is_not_cut_where_its_steps_compute_fewer_examples_than_the_prefixes() -> None:
    """Rows that pad count: clients of 30 to 1 rows are padded to 30 each. One epoch of equal
    clients sees each row once, and so would the prefixes.
    """

    def is_cut(partition: str, epochs: int) -> bool:
        phase = Phase(epochs=epochs, trainable=lambda world, names: tuple(sorted(HEAD)))
        experiment = small_experiment(
            tuning((phase,)),
            IMAGES | {"data.partition": partition},
            module=init_module(Net, Key(0)),
        )
        engine = VectorizedEngine(experiment.task, 6, "captured")
        list(engine.train(make_work(experiment, first_state(experiment), 1)))
        return engine.captured[0].cached_features

    equal = "dirichlet(alpha=0.5, samples=8)"
    assert [is_cut(equal, 1), is_cut(equal, 2)] == [False, True]
    skewed = "quantity(power=2.5, minimum=1)"
    assert [is_cut(skewed, 2), is_cut(skewed, 6)] == [False, True]


def test_batch_norm_behind_the_prefix_keeps_its_statistics() -> None:
    """Equal clients, a fixed convolution before a batch norm whose buffers move."""
    phases = (
        Phase(
            epochs=2,
            trainable=lambda world, names: tuple(name for name in names if "conv" not in name),
        ),
    )
    changes = IMAGES | {"data.partition": "dirichlet(alpha=0.5, samples=8)"}
    experiment = small_experiment(
        tuning(phases), changes, module=init_module(lambda: Net(nn.BatchNorm2d(3)), Key(0))
    )
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    assert float(expected.server.model.buffers["middle.running_mean"].abs().max()) > 0
    for engine in (FastSequentialEngine(experiment.task), VectorizedEngine(experiment.task, 4)):
        state, _ = run_rounds(experiment, engine, 2)
        assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE


def test_the_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of 8 rows, batch 4, one epoch of everything and three of the head: the plain
    loop convolves in 2 + 6 steps, ours in 2 steps and once more.
    """
    calls: list[int] = []
    convolve = nn.Conv2d.forward

    def counted(layer: nn.Conv2d, x: Tensor) -> Tensor:
        if x.dim() == 4 and torch.is_tensor(x):
            calls.append(len(x))
        return convolve(layer, x)

    phases = (Phase(epochs=1), Phase(epochs=3, trainable=lambda world, names: tuple(sorted(HEAD))))
    changes = IMAGES | {"data.partition": "dirichlet(alpha=0.5, samples=8)", "data.validation": 0.0}
    experiment = small_experiment(tuning(phases), changes, module=init_module(Net, Key(0)))
    job = make_work(experiment, first_state(experiment), 1)
    one = job._replace(clients=job.clients[:1], stats=experiment.client_stats(job.clients[:1], 0))
    tuned, stack = FastSequentialEngine(experiment.task), VectorizedEngine(experiment.task, 1)
    for engine in (tuned, stack):
        # where the network can be cut is found once, by looking at a few rows
        list(engine.train(one))
    seen = {}
    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    for name, each in (
        ("plain", SequentialEngine(experiment.task)),
        ("tuned", tuned),
        ("stack", stack),
    ):
        list(each.train(one))
        seen[name] = list(calls)
        calls.clear()
    assert seen["plain"] == [4] * 8
    assert seen["tuned"] == [4, 4, 8]
    assert seen["stack"] == [4, 4, 8]


def test_activations_that_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the whole network is run in every step, with the same result; every client begins
    with a front of its own here.
    """
    phases = (Phase(epochs=2, trainable=lambda world, names: tuple(sorted(HEAD))),)
    experiment = small_experiment(tuning(phases), IMAGES, module=init_module(Net, Key(0)))
    job = with_client_models(make_work(experiment, first_state(experiment), 1))
    params = {
        name: value * (1 + torch.arange(6).reshape(-1, *(1,) * (value.dim() - 1)) / 10)
        for name, value in job.start.params.items()
    }
    job = job._replace(start=ModelState(params, {}))

    def train() -> list[Reply]:
        engines = (
            SequentialEngine(experiment.task),
            FastSequentialEngine(experiment.task),
            VectorizedEngine(experiment.task, 4),
        )
        replies = (Reply.concat(list(engine.train(job))) for engine in engines)
        return [reply.select(torch.argsort(reply.client)) for reply in replies]

    with_room = train()
    monkeypatch.setattr("remanence.engines.sequential_fast.CACHE_BYTES", 0)
    monkeypatch.setattr("remanence.engines.vectorized.CACHE_BYTES", {"cpu": 0})
    for reply in [*with_room, *train()]:
        assert max_rel_diff(reply._asdict(), with_room[0]._asdict())[1] <= TOLERANCE
