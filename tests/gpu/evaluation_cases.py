"""Evaluation of a stack on the GPU against `sequential` on the CPU, in float64: models in turn with
channels-last images, in pieces, compiled, and stacked; networks with `x.view(len(x), -1)`.

The numbers of examples are around the sizes of pieces: a last piece of more than half of a compiled
chunk is padded, a shorter one is computed without the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from gpu.cases import Case, counted, difference, evaluate_as_on_gpu
from torch import Tensor, nn

from remanence.core import memory_format, model, pytree
from remanence.core.model import init_module
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.engines import compiled_eval, stack_eval
from remanence.engines.compiled_eval import CompiledEvalModel
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import small_experiment

MODELS = 3


class FlattenNet(nn.Module):
    """3x6x6 images through a convolution, flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(torch.relu(self.convolve(x))))
        return logits

    def rows(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class ViewNet(FlattenNet):
    """The same with `view`, which fails on channels-last images."""

    def rows(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def evaluated(network: type[nn.Module], test: int, device: str) -> BuiltExperiment:
    """Clients of 1 to about 40 examples, and a test set of this size."""
    changes = {
        "data.name": f"synthetic(samples={test + 120}, classes=3, shape='3x6x6',"
        f" test={test / (test + 120)})",
        "data.public": 9,
        "device": device,
    }
    return small_experiment("fedavg", changes, module=init_module(network, Key(0)))


def models_of(experiment: BuiltExperiment) -> ModelState:
    """Three that differ."""
    return ModelState(
        *(
            pytree.map(lambda x: torch.stack([x, 2 * x, 3 * x]), tree)
            for tree in experiment.task.model.initial
        )
    )


def compare_scores(
    engine: VectorizedEngine, experiment: BuiltExperiment, reference: BuiltExperiment
) -> float:
    """Counts, losses and logits of three models: the same counts, and the largest difference."""
    ours, plain = models_of(experiment), models_of(reference)
    sequential, largest = SequentialEngine(reference.task), 0.0
    for split in ("test", "valid", "public"):
        found, expected = engine.score(ours, split), sequential.score(plain, split)
        assert torch.equal(found.confusion, expected.confusion), f"other counts on {split}"
        largest = max(largest, difference({"loss": found.loss}, {"loss": expected.loss}))
    which, owners = np.array([2, 0, 0, 1, 2]), np.array([5, 4, 0, 1, 0])
    pairs, wanted = (
        each.score_pairs(models, which, owners, "train")
        for each, models in ((engine, ours), (sequential, plain))
    )
    assert torch.equal(pairs.confusion, wanted.confusion), "other counts of pairs"
    logits = engine.predict_logits(ours, experiment.task.public.to(experiment.task.info.device))
    expected_logits = sequential.predict_logits(plain, reference.task.public)
    return max(
        largest,
        difference({"loss": pairs.loss}, {"loss": wanted.loss}),
        difference({"logits": logits}, {"logits": expected_logits}),
    )


def many_examples(
    network: type[nn.Module], execution: str, share: float, max_rows: int, device: str
) -> float:
    """Models in turn: whole chunks and a share of one, or pieces of `max_rows` examples."""
    chunk = compiled_eval.ROWS[device]
    whole = -(-stack_eval.GPU_FILL_ROWS // chunk) * chunk
    test = whole + int(share * chunk) if max_rows == 0 else 1300
    reference, experiment = (evaluated(network, test, each) for each in ("cpu", device))
    assert len(reference.task.test.y) == test
    engine = evaluate_as_on_gpu(VectorizedEngine(experiment.task, 64, execution))
    engine.max_rows = max_rows or engine.max_rows
    with (
        counted(CompiledEvalModel, "predict", lambda *args: len(args[2])) as in_turn,
        counted(CompiledEvalModel, "_predict_chunk", lambda *args: len(args[3])) as chunks,
        counted(memory_format, "to_channels_last") as layouts,
        counted(model, "ViewAsReshape") as views,
    ):
        largest = compare_scores(engine, experiment, reference)
    assert engine.degraded_reason == "", engine.degraded_reason
    assert len(in_turn) >= MODELS, "the models did not take turns"
    assert layouts, "images were not stored channels last"
    assert bool(views) == (network is ViewNet), "view and reshape were confused"
    assert bool(chunks) == (execution == "compiled"), "evaluation was compiled or not, wrongly"
    padded = any(rows < chunk for rows in chunks)
    assert not chunks or padded == (share > 0.5), "a piece was padded or not, wrongly"
    if max_rows:
        assert max(in_turn) == max_rows, f"pieces of {max(in_turn)} examples"
    return largest


def few_examples(network: type[nn.Module], device: str) -> float:
    """All models of the stack at once, by the kernels for convolutions."""
    reference, experiment = (evaluated(network, 200, each) for each in ("cpu", device))
    engine = evaluate_as_on_gpu(VectorizedEngine(experiment.task, 64, "eager"))
    engine.max_rows = 90  # windows of 30 examples
    with (
        counted(stack_eval, "with_convolutions") as kernels,
        counted(CompiledEvalModel, "predict") as in_turn,
    ):
        largest = compare_scores(engine, experiment, reference)
    assert kernels, "the kernels for convolutions were not asked for"
    assert not in_turn, "the models took turns"
    assert engine.use_kernels, engine.degraded_reason
    return largest


def cases() -> Iterator[Case]:
    for network in (FlattenNet, ViewNet):
        title = "view" if network is ViewNet else "flatten"
        for execution in ("eager", "compiled"):
            for share, name in ((0.4, "a short last piece"), (0.6, "a padded last piece")):
                yield Case(
                    f"evaluation of a network with {title}, {name}, {execution}",
                    partial(many_examples, network, execution, share, 0),
                    20 if execution == "compiled" else 3,
                )
        yield Case(
            f"evaluation of a network with {title}, pieces of 500",
            partial(many_examples, network, "eager", 0.0, 500),
        )
        yield Case(
            f"evaluation of a network with {title}, few examples", partial(few_examples, network)
        )
