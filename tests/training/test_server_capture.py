"""Training at the server gives the same result with captured and with eager steps, round after
round. On CUDA the same code replays a CUDA graph.
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
    """Capture steps, as on a GPU. -> all captured steps"""
    captured: list[CapturedServerSteps] = []

    class Watched(CapturedServerSteps):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            captured.append(self)

    monkeypatch.setattr(server_capture, "CapturedServerSteps", Watched)
    monkeypatch.setattr(server_training, "get_steps", get_captured)
    return captured


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.01)"])
def test_captured_steps_equal_eager_ones(
    method: str, optimizer: str, made: list[CapturedServerSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds, each with another model, other teachers, other batches and, for FedDF,
    decaying learning rates; steps are captured once.
    """
    changes = {"data.public": 18, "local.optimizer": optimizer}
    captured, _ = run_rounds(
        experiment := small_experiment(method, changes), SequentialEngine(experiment.task), 3
    )
    assert len(made) == 1
    assert made[0].replays
    monkeypatch.setattr(server_training, "get_steps", get_steps)
    eager, _ = run_rounds(
        experiment := small_experiment(method, changes), SequentialEngine(experiment.task), 3
    )
    assert len(made) == 1
    assert max_rel_diff(state_tree(captured), state_tree(eager))[1] == 0


class Compiling(SequentialEngine):
    """Trains its clients eagerly but reports compiled steps, so that the server compiles its own."""

    execution = "compiled"


def test_compiled_steps_equal_eager_ones() -> None:
    """Flashback's server, two rounds with two batch sizes. Only rounding may differ, because sums
    are grouped differently.
    """
    changes = {"data.public": 18, "local.optimizer": "sgd(lr=0.1, momentum=0.9)"}
    compiled, plain = (small_experiment("flashback(server_epochs=2)", changes) for _ in range(2))
    after, _ = run_rounds(compiled, Compiling(compiled.task), 2)
    (known,) = compiled.task.engine_cache["server steps"]
    assert known.steps.compile  # no fallback to eager steps
    assert sorted(known.steps.replays) == [2, 4]
    assert (
        max_rel_diff(
            state_tree(after), state_tree(run_rounds(plain, SequentialEngine(plain.task), 2)[0])
        )[1]
        <= 1e-12
    )


def test_steps_that_cannot_be_compiled_run_eagerly_with_a_warning(
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
        "training at the server could not be compiled (no compiler here): its steps run eagerly"
    ]
    assert (
        max_rel_diff(
            state_tree(after), state_tree(run_rounds(plain, SequentialEngine(plain.task), 2)[0])
        )[1]
        <= 1e-12
    )


def test_two_tasks_share_no_captured_steps(made: list[CapturedServerSteps]) -> None:
    for seed in (0, 1):
        experiment = small_experiment(METHODS[0], {"data.public": 18, "seed": seed})
        run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert len(made) == 2


def test_a_state_that_was_read_does_not_change() -> None:
    """The next step changes the captured tensors, not a copy of them."""
    state = server_capture.ServerTrainState({"w": torch.tensor([1.0])}, {}, {})
    inputs = server_capture.StepInputs(
        server_training.ModelState({}, {}),
        {},
        *(torch.zeros(3, 1, dtype=torch.int64) for _ in range(3)),
        {},
    )
    steps = CapturedServerSteps(
        lambda inputs, state, step, batch_size: state._replace(
            params={"w": state.params["w"] * 2 + step}
        ),
        state,
        inputs,
    )
    steps.begin(state, inputs)
    steps.take(0, 1)
    kept = steps.read()
    steps.take(1, 1)
    # 1 * 2 + 0; 2 * 2 + 1
    assert (kept.params["w"].item(), steps.read().params["w"].item()) == (2.0, 5.0)
    assert steps.begin(state, inputs).read().params["w"].item() == 1.0


def test_a_loss_with_a_closure_is_not_captured() -> None:
    def plain(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
        return out.logits[:, 0]

    remembered = torch.ones(1)

    def closure(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
        return out.logits[:, 0] * remembered

    assert is_pure(plain)
    assert not is_pure(closure)
    assert not is_pure(partial(plain, loss_args={}))

    class Scaled:
        def loss(self, out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
            return out.logits[:, 0]

    assert not is_pure(Scaled().loss)


def test_captured_steps_are_not_pickled_with_a_task() -> None:
    assert pickle.loads(pickle.dumps(EngineCache({"server steps": [1]}))) == {}
