"""Replies of a few clients with two parameters, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from remanence.core.engine import ClientWork
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply

START = ModelState(
    {
        "a": torch.tensor(1.0, dtype=torch.float64),
        "b": torch.tensor([[2.0, 0.0]], dtype=torch.float64),
        "kept": torch.zeros(2),
    },
    {},
)


def make_replies(
    rows: Sequence[Sequence[float]],
    clients: Sequence[int] | None = None,
    extras: Any = None,
    round: int = 3,
) -> Reply:
    """rows: [k, 3] -> parameters a [k] and b [k, 1, 2]"""
    values = torch.tensor(rows, dtype=torch.float64)
    k = len(values)
    client = torch.arange(k) if clients is None else torch.tensor(list(clients))
    params = {"a": values[:, 0].clone(), "b": values[:, 1:].reshape(k, 1, 2).clone()}
    weight = 10.0 + torch.arange(k, dtype=torch.float64)
    return Reply(
        client,
        torch.full((k,), round),
        params,
        {},
        extras or {},
        weight,
        {},
        torch.zeros(k, dtype=torch.float64),
    )


def rows_of(replies: Reply) -> list[list[float]]:
    rows: list[list[float]] = torch.cat(
        [replies.params["a"].unsqueeze(1), replies.params["b"].flatten(1)], dim=1
    ).tolist()
    return rows


def make_job(
    clients: Sequence[int], start: ModelState = START, personal: bool = False, round: int = 3
) -> ClientWork:
    empty: Any = None
    return ClientWork(
        round,
        0,
        np.array(clients),
        start,
        personal,
        {},
        {},
        empty,
        {},
        Key(0).fold_in("round", round),
    )
