"""Training at the server from recorded steps equals the plain steps, round after round; on CUDA
the same code replays a CUDA graph.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from remanence.core.pytree import Tree
from remanence.core.types import Batch, Output
from remanence.engines.sequential import SequentialEngine
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment, state_tree
from remanence.training import server_capture, server_training
from remanence.training.server_capture import CapturedServerSteps, get_captured, get_steps, is_pure
from remanence.training.task import EngineCache

METHODS = [
    "flashback(server_epochs=2)",
    "feddf(steps=30, patience=10, batch=4, validation=0.25)",
    "feddf(steps=12, batch=5, validation=0)",
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CapturedServerSteps]:
    """Steps are recorded, as on a GPU. -> all recordings"""
    recordings: list[CapturedServerSteps] = []

    class Watched(CapturedServerSteps):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            recordings.append(self)

    monkeypatch.setattr(server_capture, "CapturedServerSteps", Watched)
    monkeypatch.setattr(server_training, "get_steps", get_captured)
    return recordings


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)"])
def test_recorded_steps_equal_plain_ones(
    method: str, optimizer: str, made: list[CapturedServerSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds, each with another model, other teachers, other batches and, for FedDF,
    falling rates; one recording serves all of them.
    """
    changes = {"data.public": 18, "local.optimizer": optimizer}
    recorded, _ = run_rounds(
        experiment := small_experiment(method, changes), SequentialEngine(experiment.task), 3
    )
    assert len(made) == 1
    assert made[0].replays
    monkeypatch.setattr(server_training, "get_steps", get_steps)
    plain, _ = run_rounds(
        experiment := small_experiment(method, changes), SequentialEngine(experiment.task), 3
    )
    assert len(made) == 1
    assert max_rel_diff(state_tree(recorded), state_tree(plain))[1] == 0


class Compiling(SequentialEngine):
    """Trains its clients plainly, but says that steps are compiled: so the server's are."""

    execution = "compiled"


def test_compiled_steps_equal_plain_ones() -> None:
    """Flashback's server, two rounds with batches of two widths. Rounding alone may differ:
    sums are grouped otherwise.
    """
    changes = {"data.public": 18, "local.optimizer": "sgd(lr=0.1, momentum=0.9)"}
    compiled, plain = (small_experiment("flashback(server_epochs=2)", changes) for _ in range(2))
    after, _ = run_rounds(compiled, Compiling(compiled.task), 2)
    (known,) = compiled.task.engine_cache["server steps"]
    assert known.steps.compile  # it did not fall back
    assert sorted(known.steps.replays) == [2, 4]
    assert (
        max_rel_diff(
            state_tree(after), state_tree(run_rounds(plain, SequentialEngine(plain.task), 2)[0])
        )[1]
        <= 1e-12
    )


def test_what_cannot_be_compiled_is_done_plainly_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(server_capture, "TracedFunction", fail)
    tried, plain = (
        small_experiment("flashback(server_epochs=2)", {"data.public": 18}) for _ in range(2)
    )
    after, _ = run_rounds(tried, Compiling(tried.task), 2)
    assert caplog.messages == [
        "training at the server could not be compiled (no compiler here): its steps are plain ones"
    ]
    assert (
        max_rel_diff(
            state_tree(after), state_tree(run_rounds(plain, SequentialEngine(plain.task), 2)[0])
        )[1]
        <= 1e-12
    )


def test_two_tasks_share_nothing(made: list[CapturedServerSteps]) -> None:
    for seed in (0, 1):
        experiment = small_experiment(METHODS[0], {"data.public": 18, "seed": seed})
        run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert len(made) == 2


def test_what_is_read_does_not_change_with_the_next_step() -> None:
    """Memory moves on; a model that was kept does not."""
    moving = server_capture.ServerTrainState({"w": torch.tensor([1.0])}, {}, {})
    scene = server_capture.StepInputs(
        server_training.ModelState({}, {}),
        {},
        *(torch.zeros(3, 1, dtype=torch.int64) for _ in range(3)),
        {},
    )
    steps = CapturedServerSteps(
        lambda scene, now, at, width: now._replace(params={"w": now.params["w"] * 2 + at}),
        moving,
        scene,
    )
    steps.begin(moving, scene)
    steps.take(0, 1)
    kept = steps.read()
    steps.take(1, 1)
    # 1 * 2 + 0; 2 * 2 + 1
    assert (kept.params["w"].item(), steps.read().params["w"].item()) == (2.0, 5.0)
    assert steps.begin(moving, scene).read().params["w"].item() == 1.0


def test_a_loss_that_remembers_is_not_recorded() -> None:
    def plain(out: Output, batch: Batch, place: Tensor, given: Tree) -> Tensor:
        return out.logits[:, 0]

    remembered = torch.ones(1)

    def closure(out: Output, batch: Batch, place: Tensor, given: Tree) -> Tensor:
        return out.logits[:, 0] * remembered

    assert is_pure(plain)
    assert not is_pure(closure)
    assert not is_pure(partial(plain, given={}))


def test_recordings_do_not_travel_with_a_task() -> None:
    assert pickle.loads(pickle.dumps(EngineCache({"server steps": [1]}))) == {}
