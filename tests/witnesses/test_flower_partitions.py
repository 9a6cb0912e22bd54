"""Partitions against those of Flower's datasets, from the same random draws.

Their rows of a class are dealt in another order, so the numbers of examples of each class at each
client are compared. Shards, groups and IID sizes are equal. A Dirichlet mix over the clients of a
class differs by at most one example, because ours rounds where theirs cuts off.

`dirichlet` has no counterpart: Flower's InnerDirichletPartitioner deals to the clients in turn,
example by example, and is less skewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from witnesses.libraries import check, needs

from remanence.core.rng import Key
from remanence.data.partitions import _log_dirichlet, dirichlet_by_class, iid, shards
from remanence.data.structured_partitions import by_group

pytestmark = [pytest.mark.slow, needs("flwr_datasets"), pytest.mark.filterwarnings("ignore")]
EXAMPLES, CLASSES, CLIENTS = 1200, 5, 12
KEY = Key(7)
LABELS = np.random.default_rng(1).integers(CLASSES, size=EXAMPLES)


def deal(partitioner: Any, **columns: np.ndarray) -> list[np.ndarray]:
    """The rows of each client, by Flower's partitioner. -> [k][n]"""
    from datasets import Dataset

    columns = {"row": np.arange(EXAMPLES), "label": LABELS, **columns}
    partitioner.dataset = Dataset.from_dict(
        {name: list(map(int, v)) for name, v in columns.items()}
    )
    return [
        np.sort(np.array(partitioner.load_partition(client)["row"]))
        for client in range(partitioner.num_partitions)
    ]


def count(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(LABELS[held], minlength=CLASSES) for held in rows])


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> int:
    assert sorted(np.concatenate(theirs).tolist()) == list(range(EXAMPLES))
    assert sorted(np.concatenate(ours).tolist()) == list(range(EXAMPLES))
    return int(np.abs(count(ours) - count(theirs)).max())


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_by_class(alpha: float) -> None:
    from flwr_datasets.partitioner import DirichletPartitioner

    draw = KEY.fold_in("dirichlet_by_class").generator()
    mixes = np.exp(_log_dirichlet(draw, alpha, (CLASSES, CLIENTS)))
    mixes = iter(mixes / mixes.sum(axis=1, keepdims=True))
    theirs = DirichletPartitioner(CLIENTS, "label", alpha=alpha, min_partition_size=0)
    theirs._rng = SimpleNamespace(dirichlet=lambda _: next(mixes), shuffle=lambda _: None)
    made = dirichlet_by_class(alpha=alpha, minimum=0)
    ours = made(LABELS, None, CLIENTS, CLASSES, KEY)
    check("dirichlet_by_class, examples", largest_difference(ours, deal(theirs)), 1)
    other = made(LABELS, None, CLIENTS, CLASSES, Key(8))
    assert np.abs(count(other) - count(ours)).max() > 10


@pytest.mark.parametrize("per_client", [1, 2])
def test_shards(per_client: int) -> None:
    from flwr_datasets.partitioner import ShardPartitioner

    order = KEY.fold_in("shards", "order").permutation(CLIENTS * per_client)
    theirs = ShardPartitioner(CLIENTS, "label", num_shards_per_partition=per_client)
    theirs._rng = SimpleNamespace(permutation=lambda _: order, shuffle=lambda _: None)
    ours = shards(per_client=per_client)(LABELS, None, CLIENTS, CLASSES, KEY)
    check("shards, examples", largest_difference(ours, deal(theirs)), 0)


def test_iid_sizes() -> None:
    from flwr_datasets.partitioner import IidPartitioner

    for clients in (CLIENTS, 7):
        ours = iid()(LABELS, None, clients, CLASSES, KEY)
        theirs = deal(IidPartitioner(clients))
        assert [len(rows) for rows in ours] == [len(rows) for rows in theirs]


def test_groups() -> None:
    """One client for each group, with exactly its rows."""
    from flwr_datasets.partitioner import NaturalIdPartitioner

    groups = np.random.default_rng(2).integers(CLIENTS, size=EXAMPLES)
    theirs = deal(NaturalIdPartitioner(partition_by="writer"), writer=groups)
    ours = by_group()(LABELS, groups, None, CLASSES, KEY)
    assert {tuple(rows) for rows in ours} == {tuple(rows) for rows in theirs}
    assert len(ours) == CLIENTS
