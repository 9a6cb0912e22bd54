"""sequential == vectorized == processes, at 1e-12 in float64, for every method and every setting that
could tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from remanence.core import pytree
from remanence.core.engine import Engine
from remanence.core.errors import InputError
from remanence.core.model import init_module
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply
from remanence.data.population import ClientData, PartitionIndices
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import LOSSES, wsm
from remanence.methods import METHODS, fedprox
from remanence.rounds.federated import make_work
from remanence.rounds.loop import start_run
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE, check_engine
from remanence.testing.toy_task import (
    EQUAL,
    all_slots_part,
    as_method,
    batch_norm_net,
    fast_config,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
    with_client_models,
)
from remanence.training.state import RunState
from remanence.training.task import TrainingTask

STACKS = (1, 2, 3, 64)
# own, server, share, before, after, extras, a transform, a penalty and a loss
EVERYTHING = all_slots_part() + fedprox(mu=0.1) + wsm()
IMAGES = {"data.name": "synthetic(samples=64, classes=4, shape='2x6x6', test=0.25)"}

MAKERS: dict[str, Callable[[TrainingTask], Engine]] = {
    **{
        f"vectorized-{stack}": lambda task, stack=stack: VectorizedEngine(task, stack)
        for stack in STACKS
    },
    "processes": lambda task: ProcessEngine(task, workers=2),
}


def names_of_methods() -> Iterator[str]:
    """Every method, alone and with every loss it can be combined with; new ones are found by
    themselves.
    """
    for name in METHODS:
        method = fast_config(name)
        yield method
        for objective in LOSSES:
            try:
                as_method(f"{method}+{objective}")
            except InputError:
                continue  # a method that brings its own loss
            yield f"{method}+{objective}"


def assert_equal_engines(
    experiment: BuiltExperiment,
    rounds: int = 3,
    makers: tuple[str, ...] = ("vectorized-3", "processes"),
) -> RunState:
    """-> the state on which all of them agree"""
    expected, lines = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
    assert not [line["rejected"] for line in lines if line["rejected"] or line["abandoned"]]
    for name in makers:
        with closing(MAKERS[name](experiment.task)) as engine:
            state, others = run_rounds(experiment, engine, rounds)
        place, distance = max_rel_diff(state_tree(state), state_tree(expected))
        assert distance <= TOLERANCE, f"{name} differs from sequential by {distance:.1e} at {place}"
        for line, other in zip(lines, others, strict=True):
            assert other["per_class"] == line["per_class"]
            assert other["train_loss"] == pytest.approx(line["train_loss"], abs=TOLERANCE)
            assert (other["bytes_up"], other["bytes_down"]) == (
                line["bytes_up"],
                line["bytes_down"],
            )
    return expected


# ------------------------------------------------------------------------------------- every method


@pytest.mark.parametrize("method", [*map(fast_config, METHODS), "fedavg+wsm(with_validation=true)"])
def test_every_method_on_every_engine_and_stack(method: str) -> None:
    """Clients of 30 to 1 examples, four of six in a round, SGD with momentum."""
    assert_equal_engines(small_experiment(method), makers=tuple(MAKERS))


@pytest.mark.parametrize("method", list(names_of_methods()))
def test_every_method_with_every_loss(method: str) -> None:
    assert_equal_engines(
        small_experiment(method, {"seed": 1, "local.optimizer": "sgd(lr=0.1, weight_decay=0.01)"})
    )


def test_the_tables_are_searched() -> None:
    found = set(names_of_methods())
    assert {fast_config(name) for name in METHODS} <= found
    assert {"fedavg+wsm", "fedavg+tce", "fedprox+wsm", "fedprox+tce"} <= found


# ------------------------------------------------------------------------------------ every setting


def net(*layers: nn.Module, features: int) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(*layers), nn.Linear(features, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x))
            return logits

    return init_module(Net, Key(0))


def conv(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """2x6x6 images -> 4 maps of 3x3"""
    return lambda: net(
        nn.Conv2d(2, 4, 3, padding=1), norm(), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), features=36
    )


def dropout_net() -> nn.Module:
    return net(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        features=36,
    )


CASES: dict[str, tuple[dict[str, Any], Callable[[], nn.Module] | None]] = {
    "two epochs": ({"local.epochs": 2}, None),
    "steps instead of epochs": ({"local.steps": 5}, None),
    "drop_last": ({"local.drop_last": True}, None),
    "a batch larger than any client": ({"local.batch_size": 50}, None),
    "batches of one": ({"local.batch_size": 1, "clients.sample": 3}, None),
    "nesterov": (
        {"local.optimizer": "sgd(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=true)"},
        None,
    ),
    "adam": ({"local.optimizer": "adam(lr=0.01, eps=1e-4)"}, None),
    "adamw": ({"local.optimizer": "adamw(lr=0.01, eps=1e-4)"}, None),
    "a schedule": ({"local.schedule": "cosine", "rounds": 3}, None),
    "no validation rows": ({"data.validation": 0}, None),
    "one client a round": ({"clients.sample": 1}, None),
    "all clients in a round": ({"clients.sample": 6}, None),
    "clients' models recorded": ({"record.local": True}, None),
    "tokens": (
        {
            "data.name": "tokens(samples=64, classes=4, length=5, vocabulary=12, test=0.25)",
            "model": "text(width=4, vocabulary=12)",
        },
        None,
    ),
    "images": (IMAGES | {"model": "mlp(hidden=6)"}, None),
    "group norm": (IMAGES, conv(lambda: nn.GroupNorm(2, 4))),
    "max pooling": (
        IMAGES,
        lambda: net(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), features=27),
    ),
    "dropout": (IMAGES, dropout_net),
    "crop and flip": (IMAGES | {"data.augment": ("crop", "flip")}, conv(nn.Identity)),
    "cutout": (IMAGES | {"data.augment": ("cutout",)}, conv(nn.Identity)),
    "batch norm": (IMAGES | EQUAL, conv(lambda: nn.BatchNorm2d(4))),
    "batch norm, buffers local": (
        IMAGES | EQUAL | {"local.buffers": "local"},
        conv(lambda: nn.BatchNorm2d(4)),
    ),
    "batch norm, buffers frozen": (
        IMAGES | EQUAL | {"local.buffers": "frozen"},
        conv(lambda: nn.BatchNorm2d(4)),
    ),
    "batch norm, clients' models recorded": (
        EQUAL | {"local.buffers": "local", "record.local": True},
        batch_norm_net,
    ),
    "batch norm, dropped last batch": (EQUAL | {"local.drop_last": True}, batch_norm_net),
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting(case: str) -> None:
    changes, make_module = CASES[case]
    assert_equal_engines(
        small_experiment(EVERYTHING, changes, module=make_module() if make_module else None)
    )


@pytest.mark.parametrize("stack", [2, 64])
def test_batch_norm_with_a_short_last_batch_in_any_stack(stack: int) -> None:
    """The papers' 450 examples at batch 64 leave a last batch of 2 for every client; here it is
    6 examples at batch 4.
    """
    experiment = small_experiment(EVERYTHING, EQUAL | {"local.epochs": 2}, module=batch_norm_net())
    assert set(experiment.task.population.at(0).train.sizes.tolist()) == {6}
    state = assert_equal_engines(experiment, makers=(f"vectorized-{stack}",))
    # two epochs of a batch of 4 and one of 2, in three rounds: the counters of all clients agree,
    # and the largest is taken
    assert int(state.server.model.buffers["norm.num_batches_tracked"]) == 3 * 2 * 2


def with_clients(experiment: BuiltExperiment, *steps: list[int]) -> BuiltExperiment:
    """The experiment with clients of exactly these sizes at each time step; rows change hands
    in between.
    """
    client_data = []
    for number, sizes in enumerate(steps):
        rows = np.roll(np.arange(sum(sizes)), 5 * number)
        parts = np.split(rows, np.cumsum(sizes)[:-1])
        client_data.append(
            ClientData(
                PartitionIndices.concat(parts),
                PartitionIndices.concat([part[:1] for part in parts]),
                np.zeros(len(parts), np.int64),
            )
        )
    world = replace(experiment.task.info, num_clients=len(steps[0]))
    population = replace(experiment.task.population, time_steps=tuple(client_data))
    return replace(
        experiment,
        cohort_size=len(steps[0]),
        task=replace(experiment.task, population=population, info=world),
    )


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    batch=st.integers(1, 6),
    length=st.sampled_from([{"local.epochs": 1}, {"local.epochs": 2}, {"local.steps": 3}]),
    drop_last=st.booleans(),
    stack=st.sampled_from(STACKS),
)
def test_any_sizes_in_any_stack(
    sizes: list[int], batch: int, length: dict[str, int], drop_last: bool, stack: int
) -> None:
    changes = length | {
        "local.batch_size": batch,
        "local.drop_last": drop_last,
        "model": "mlp(hidden='')",
        "data.partition": "iid",
    }
    assert_equal_engines(
        with_clients(small_experiment(EVERYTHING, changes), sizes),
        rounds=2,
        makers=(f"vectorized-{stack}",),
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_later_time_step_has_its_own_rows(name: str) -> None:
    experiment = with_clients(small_experiment(EVERYTHING), [9, 2, 4], [1, 8, 6])
    job = make_work(experiment, first_state(experiment), 1)._replace(
        time_step=1, stats=experiment.client_stats(np.arange(3), 1)
    )
    with closing(MAKERS[name](experiment.task)) as engine:
        reply, wanted = (
            Reply.concat(sorted(e.train(job), key=lambda r: int(r.client[0])))
            for e in (engine, SequentialEngine(experiment.task))
        )
        reply = reply.select(torch.argsort(reply.client))
        assert reply.weight.tolist() == [1, 8, 6]
        assert max_rel_diff(reply._asdict(), wanted._asdict())[1] <= TOLERANCE
        models = with_client_models(job).start
        scores, by_loop = (
            e.score(models, "train", np.array([1, 2]), time_step=1)
            for e in (engine, SequentialEngine(experiment.task))
        )
        assert scores.confusion.sum(dim=(2, 3)).tolist() == [[8, 6]] * 3
        assert torch.equal(scores.confusion, by_loop.confusion)


@pytest.mark.parametrize("case", ["dropout", "crop and flip"])
def test_what_draws_at_random_draws(case: str) -> None:
    """Else their agreement above would mean nothing."""
    changes, make_module = CASES[case]
    assert make_module is not None
    drawn, _ = run_rounds(
        experiment := small_experiment("fedavg", changes, module=make_module()),
        SequentialEngine(experiment.task),
        1,
    )
    still = {
        "dropout": ({"seed": 1}, make_module),
        "crop and flip": ({"data.augment": ()}, make_module),
    }[case]
    other, _ = run_rounds(
        experiment := small_experiment("fedavg", changes | still[0], module=still[1]()),
        SequentialEngine(experiment.task),
        1,
    )
    assert max_rel_diff(state_tree(drawn), state_tree(other))[1] > 1e-4


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_where_the_buffers_go(buffers: str) -> None:
    """average: the server's change; local: they stay with the clients; frozen: none change."""
    experiment = small_experiment(
        "fedavg", EQUAL | {"local.buffers": buffers}, module=batch_norm_net()
    )
    state = assert_equal_engines(experiment)
    first = experiment.task.model.initial.buffers
    moved = max_rel_diff(state.server.model.buffers, first)[1] > 0
    kept = [
        max_rel_diff(own["personal"]["buffers"], first)[1] > 0
        for own in state.client_states.values()
    ]
    assert (moved, bool(kept) and all(kept)) == {
        "average": (True, False),
        "local": (False, True),
        "frozen": (False, False),
    }[buffers]


# ---------------------------------------------------------------------------- the engine's contract


@pytest.mark.parametrize("name", ["sequential", *MAKERS])
def test_every_engine_keeps_the_contract(name: str) -> None:
    """Equal to sequential in training (also from starts of their own) and in scoring (one model and many,
    every split, groups by owner), inputs untouched, and a client's reply is the same in any cohort.
    """
    check_engine(SequentialEngine if name == "sequential" else MAKERS[name])


def test_loop_is_bitwise_the_same_in_any_cohort() -> None:
    experiment = small_experiment(EVERYTHING, {"clients.sample": 6})
    job = make_work(experiment, first_state(experiment), 1)
    whole = {int(reply.client): reply for reply in SequentialEngine(experiment.task).train(job)}
    few = make_work(replace(experiment, cohort_size=2), first_state(experiment), 1)
    assert len(few.clients) == 2
    for reply in SequentialEngine(experiment.task).train(few):
        assert max_rel_diff(reply._asdict(), whole[int(reply.client)]._asdict()) == ("", 0.0)


@pytest.mark.parametrize("name", ["sequential", "vectorized-3", "processes"])
def test_scores_by_hand(name: str) -> None:
    """Against the module itself, row by row, for two models, by owner, over more rows than a
    model sees at once.
    """
    data = {
        "data.name": "synthetic(samples=1400, classes=4, features=5, test=0.5)",
        "data.partition": "iid",
        "clients.count": 2,
        "clients.sample": 2,
    }
    experiment = small_experiment("fedavg", data)
    task = experiment.task
    models = with_client_models(make_work(experiment, first_state(experiment), 1)).start
    split = {
        "test": [torch.arange(700)],
        "valid": [
            torch.from_numpy(task.population.at(0).valid.for_client(owner)) for owner in (1, 0)
        ],
    }
    with closing(SequentialEngine(task) if name == "sequential" else MAKERS[name](task)) as engine:
        for kind, groups in split.items():
            scores = engine.score(models, kind, np.array([1, 0]))
            assert scores.confusion.shape == (2, len(groups), 4, 4)
            examples = task.test if kind == "test" else task.train
            for number in range(2):
                module = task.model.to_module(
                    ModelState(*(pytree.take(tree, number) for tree in models))
                )
                for group, ids in enumerate(groups):
                    x, y = examples.inputs(ids), examples.labels(ids)
                    logits = module(x).detach()
                    confusion = torch.zeros(4, 4, dtype=torch.int64)
                    for label, guess in zip(y.tolist(), logits.argmax(dim=1).tolist(), strict=True):
                        confusion[label, guess] += 1
                    assert torch.equal(scores.confusion[number, group], confusion)
                    loss = -torch.log_softmax(logits, dim=1)[torch.arange(len(y)), y].sum()
                    assert float(scores.loss[number, group]) == pytest.approx(
                        float(loss), rel=1e-12
                    )


@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_a_net_that_cannot_be_stacked_is_left_to_loop(engine: str, tmp_path: Path) -> None:
    """auto takes another engine, an explicit vectorized is refused with the cure."""
    module = net(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), features=5)
    config = small_experiment("fedavg", {"engine": engine, "rounds": 1}, module=module).config
    if engine == "auto":
        assert start_run(config, tmp_path / "run", module=module).config.engine == "sequential"
    else:
        with pytest.raises(InputError, match="engine=sequential"):
            start_run(config, tmp_path / "run", module=module)
