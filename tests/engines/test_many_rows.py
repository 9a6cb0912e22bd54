"""A stack's models on a GPU, where many examples are evaluated by one model after the other; here
on a CPU that is taken for one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from remanence.core import pytree
from remanence.core.types import ModelState, Output
from remanence.engines import stack_eval
from remanence.engines.sequential import SequentialEngine
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import small_experiment

MODELS = 3


def make_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))


class Viewing(nn.Module):
    """As in many a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.convolve(x).relu().view(len(x), -1))
        return answer


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> BuiltExperiment:
    monkeypatch.setattr(stack_eval, "GPU_FILL_ROWS", 5)
    return small_experiment(
        "fedavg",
        {
            "data.name": "synthetic(samples=60, classes=3, shape='1x6x6', test=0.5)",
            "data.public": 9,
        },
        module=make_network(),
    )


def models_of(experiment: BuiltExperiment) -> ModelState:
    """Three that differ."""
    return ModelState(
        *(
            pytree.map(lambda x: torch.stack([x, 2 * x, 3 * x]), tree)
            for tree in experiment.task.model.initial
        )
    )


def on_a_gpu(experiment: BuiltExperiment, steps: str = "eager") -> VectorizedEngine:
    engine = VectorizedEngine(experiment.task, 64, steps)
    engine.cuda = engine.use_kernels = True
    return engine


def watch(
    engine: VectorizedEngine,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[int], None] = lambda rows: None,
) -> list[int]:
    """-> how many rows each look of a single model is at"""
    seen: list[int] = []
    predict = type(engine.eval_model).predict

    def spy(model: object, values: ModelState, x: Tensor) -> Output:
        before(len(x))
        seen.append(len(x))
        return predict(model, values, x)  # type: ignore[arg-type]

    monkeypatch.setattr(type(engine.eval_model), "predict", spy)
    return seen


@pytest.mark.parametrize("steps", ["eager", "compiled"])
def test_scores_and_logits_equal_sequential(
    experiment: BuiltExperiment, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sequential, models = (
        on_a_gpu(experiment, steps),
        SequentialEngine(experiment.task),
        models_of(experiment),
    )
    seen = watch(engine, monkeypatch)
    ours, plain = (each.score(models, "test") for each in (engine, sequential))
    assert torch.equal(ours.confusion, plain.confusion)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-12, atol=1e-12)
    public = experiment.task.public
    torch.testing.assert_close(
        engine.predict_logits(models, public),
        sequential.predict_logits(models, public),
        rtol=1e-12,
        atol=1e-12,
    )
    assert seen == [len(experiment.task.test.y)] * MODELS + [len(public)] * MODELS
    assert engine.degraded_reason == ""


def test_few_rows_are_looked_at_together(
    experiment: BuiltExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, models = on_a_gpu(experiment), models_of(experiment)
    seen = watch(engine, monkeypatch)
    few = experiment.task.public[:4]
    # its kernels have tests of their own
    monkeypatch.setattr(stack_eval, "with_convolutions", lambda predict: predict)
    torch.testing.assert_close(
        engine.predict_logits(models, few),
        SequentialEngine(experiment.task).predict_logits(models, few),
        rtol=1e-12,
        atol=1e-12,
    )
    assert seen == []


def test_kernels_that_fail(experiment: BuiltExperiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at few rows, and what clients do outside their steps: torch does it then, and the
    reason is given once. A fault of the network's is its own.
    """
    engine, models, few = on_a_gpu(experiment), models_of(experiment), experiment.task.public[:4]

    def broken(compute: Callable[..., object]) -> Callable[..., object]:
        def fail(*_: object) -> None:
            raise RuntimeError("no C compiler\nand more")

        return fail

    monkeypatch.setattr(stack_eval, "with_convolutions", broken)
    for _ in range(2):
        torch.testing.assert_close(
            engine.predict_logits(models, few),
            SequentialEngine(experiment.task).predict_logits(models, few),
            rtol=1e-12,
            atol=1e-12,
        )
    assert torch.equal(
        engine._map_clients(torch.square, (0,))(torch.arange(3)), torch.tensor([0, 1, 4])
    )
    assert engine.degraded_reason == "convolutions are left to torch (no C compiler)"
    other = on_a_gpu(experiment)
    with pytest.raises(ZeroDivisionError):
        other.with_kernels(lambda: 1 // 0)()
    assert other.use_kernels
    assert other.degraded_reason == ""


def test_a_network_that_views_images_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_eval, "GPU_FILL_ROWS", 5)
    changes = {
        "data.name": "synthetic(samples=60, classes=3, shape='3x6x6', test=0.5)",
        "data.public": 9,
    }
    experiment = small_experiment("fedavg", changes, module=Viewing())
    models = models_of(experiment)
    for engine in (
        on_a_gpu(experiment),
        on_a_gpu(experiment, "compiled"),
        FastSequentialEngine(experiment.task),
        FastSequentialEngine(experiment.task, "compiled"),
    ):
        ours, plain = (
            each.score(models, "test") for each in (engine, SequentialEngine(experiment.task))
        )
        assert torch.equal(ours.confusion, plain.confusion)
        assert engine.degraded_reason == ""


def test_memory_that_does_not_suffice(
    experiment: BuiltExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of the compiled network become smaller, too."""
    engine, models = on_a_gpu(experiment, "compiled"), models_of(experiment)

    def refuse(rows: int) -> None:
        if rows > 12:
            raise MemoryError

    engine.max_rows = 40
    seen = watch(engine, monkeypatch, refuse)
    assert torch.equal(
        engine.score(models, "test").confusion,
        SequentialEngine(experiment.task).score(models, "test").confusion,
    )
    assert set(seen) == {10}
    assert engine.eval_model.rows == engine.max_rows == 10  # type: ignore[attr-defined]
    assert engine.degraded_reason == ""
