"""The functions that hooks of a client may call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remanence.core.types import Batch
from remanence.training import client_ops


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
