"""The functions that hooks of a client may call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from remanence.core.types import Batch, ModelState
from remanence.testing.toy_task import EQUAL, batch_norm_net, small_experiment
from remanence.training import client_ops
from remanence.training.gradients import grad_autograd


def test_the_full_gradient_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight examples, three of them padding, in chunks of two: the last holds padding alone. The
    gradient of the mean of w * x is the mean of x.
    """
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    data = Batch(x, torch.zeros(8, dtype=torch.int64), weight, torch.arange(8))
    sizes = []

    def grad(params: Any, batch: Batch, wrt: str = "params") -> Any:
        sizes.append(len(batch.x))
        return {"w": (batch.weight * batch.x).sum() / batch.weight.sum()}

    monkeypatch.setattr(client_ops, "GRADIENT_BATCH", 2)
    one = torch.ones((), dtype=torch.float64)
    found = client_ops.full_gradient(grad, {"w": one}, data)
    assert float(found["w"]) == pytest.approx(3.0, abs=1e-15)
    assert sizes == [2, 2, 2, 2]


def test_the_gradient_of_inputs_is_in_evaluation_mode_and_the_same_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With batch norm an example's gradient in training depends on the others. Here it is that of
    the mean loss of the module in evaluation mode, example by example, and padding has none.
    """
    experiment = small_experiment("fedavg", EQUAL, module=batch_norm_net())
    task = experiment.task
    start = task.model.initial
    buffers = {name: 2 * value for name, value in start.buffers.items()}
    ids = torch.arange(7)
    batch = Batch(
        task.train.inputs(ids),
        task.train.labels(ids),
        torch.tensor([1.0] * 5 + [0.0] * 2, dtype=torch.float64),
        ids,
    )
    nobody: Any = None
    ctx: Any = SimpleNamespace(key=torch.tensor(0))
    ops = client_ops.make_client_ops(task, grad_autograd, {}, buffers, None, nobody, ctx)
    x = batch.x.clone().requires_grad_()
    module = task.model.to_module(ModelState(start.params, buffers))
    wanted = torch.autograd.grad(cross_entropy(module(x)[:5], batch.y[:5]), x)[0]
    for size in (500, 3):
        monkeypatch.setattr(client_ops, "GRADIENT_BATCH", size)
        found = ops.grad(start.params, batch, wrt="inputs")
        assert torch.allclose(found, wanted, rtol=0, atol=1e-15)
    assert float(wanted[:5].abs().max()) > 1e-3
    assert not wanted[5:].any()
