"""Replies made of points, and aggregators as plain functions on them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from remanence.core.slots import Part
from remanence.core.types import ModelState, Reply


def as_replies(
    points: Tensor, clients: Sequence[int] | None = None, buffers: dict[str, Tensor] | None = None
) -> Reply:
    """A model of two tensors, so that a distance must gather over names. points: [k, d], d >= 2"""
    k = len(points)
    ones = torch.ones(k, dtype=torch.float64)
    client = torch.arange(k) if clients is None else torch.tensor(list(clients))
    params = {"a": points[:, :1].reshape(k), "b": points[:, 1:].reshape(k, 1, -1)}
    return Reply(
        client, torch.ones(k, dtype=torch.int64), params, buffers or {}, {}, ones, {}, ones
    )


def combine(
    made: Part,
    points: Tensor,
    weights: Sequence[float] | None = None,
    start: Tensor | None = None,
    clients: Sequence[int] | None = None,
) -> Tensor:
    """The new model: `start` plus the step. points: [k, d]; start: [d], the origin where none
    is given -> [d]
    """
    k, size = points.shape
    at = torch.zeros(size, dtype=points.dtype) if start is None else start
    shares = torch.tensor(weights or [1.0] * k, dtype=torch.float64)
    srv: Any = SimpleNamespace(start=ModelState({"a": at[0], "b": at[1:].reshape(1, -1)}, {}))
    assert made.aggregate is not None
    delta = made.aggregate.finalize(
        made.aggregate.partial(shares / shares.sum(), as_replies(points, clients), srv), srv
    )
    assert delta["a"].dtype == delta["b"].dtype == points.dtype
    return at + torch.cat([delta["a"].reshape(1), delta["b"].reshape(-1)])


def doubles(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
