"""What an evaluation returns and the writer stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from remanence.core.engine import ExampleResults


class ModelCounts(NamedTuple):
    """Counts of one model on one group of examples: a record of the ledger."""

    confusion: np.ndarray  # [C, C]: true classes by predicted ones
    loss: float  # summed
    columns: dict[str, Any]  # round, time_step, moment, split, model; owner and weight


class ExampleRecords(NamedTuple):
    """Results on single training examples."""

    results: ExampleResults
    clients: np.ndarray  # of each pair of a model and a client
    columns: dict[str, Any]  # round, time_step, moment


class PeerTable(NamedTuple):
    """A number for each pair of clients."""

    kind: int  # PEER_COUNTS or SIMILARITY
    values: np.ndarray  # [K, K]
    columns: dict[str, Any]  # round, time_step


Record = ModelCounts | ExampleRecords | PeerTable


class Evaluation(NamedTuple):
    """The evaluation at the end of a round."""

    records: list[Record]
    # of metrics.jsonl, without the metrics of training; the first one is that of the test split
    rows: list[dict[str, Any]]
