"""Replies as Flower's strategies read them, and the arrays that a strategy returns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

NAME = "model"  # of the only array


def make_messages(rows: Sequence[np.ndarray], sizes: Sequence[int]) -> list[Any]:
    """One reply a client. rows: [k][d]; sizes: numbers of examples [k]"""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    contents = [
        RecordDict(
            {
                "arrays": ArrayRecord({NAME: Array(np.array(row))}),
                "metrics": MetricRecord({"num-examples": int(size)}),
            }
        )
        for row, size in zip(rows, sizes, strict=True)
    ]
    # a Message of Flower can only be made inside one of its runs
    return [SimpleNamespace(content=content, has_error=lambda: False) for content in contents]


def aggregate(
    strategy: Any, rows: Sequence[np.ndarray], sizes: Sequence[int], round: int = 1
) -> np.ndarray:
    """What a strategy makes of the replies of a round. -> [d]"""
    arrays, _ = strategy.aggregate_train(round, make_messages(rows, sizes))
    result: np.ndarray = arrays[NAME].numpy()
    return result
