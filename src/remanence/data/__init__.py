"""The data room: sources (where examples come from) and partitions (who gets them). The two
tables below are the only lists of either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import Call, instantiate
from remanence.data.cifar import cifar10, cifar100
from remanence.data.cinic import cinic10
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.data.image_folders import folder, pacs
from remanence.data.leaf_json import femnist, mnist_by_writer
from remanence.data.mnist_idx import emnist, fashion_mnist, mnist
from remanence.data.partitions import (
    Partition,
    dirichlet,
    dirichlet_by_class,
    hold_out,
    iid,
    quantity,
    shards,
    split_validation,
)
from remanence.data.sklearn_digits import digits
from remanence.data.structured_partitions import by_group, label_clusters
from remanence.data.svhn_mat import svhn
from remanence.data.synthetic import synthetic, tokens
from remanence.data.user_data import from_dataset, npz

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ArrayDataset",
    "DatasetSplit",
    "Partition",
    "check_dataset",
    "from_dataset",
    "hold_out",
    "load_dataset",
    "split_validation",
]

DATASETS: dict[str, Callable[..., ArrayDataset]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "digits": digits,
    "emnist": emnist,
    "fashion_mnist": fashion_mnist,
    "femnist": femnist,
    "folder": folder,
    "mnist": mnist,
    "mnist_by_writer": mnist_by_writer,
    "npz": npz,
    "pacs": pacs,
    "svhn": svhn,
    "synthetic": synthetic,
    "tokens": tokens,
}

PARTITIONS: dict[str, Callable[..., Partition]] = {
    "by_group": by_group,
    "dirichlet": dirichlet,
    "dirichlet_by_class": dirichlet_by_class,
    "iid": iid,
    "label_clusters": label_clusters,
    "quantity": quantity,
    "shards": shards,
}


def load_dataset(name: str, options: Mapping[str, Any], root: Path | None) -> ArrayDataset:
    """Read a source by its name; `root` is the data folder, and without it the variable
    REMANENCE_DATA names it.
    """
    if root is None and os.environ.get("REMANENCE_DATA"):
        root = Path(os.environ["REMANENCE_DATA"])
    source: ArrayDataset
    try:
        source = instantiate(
            Call(name, options),
            DATASETS,
            "source",
            None if root is None else Path(root).expanduser(),
        )
    except OSError as error:
        raise InputError(
            f"source {name!r} cannot be read ({error}): check that the file is there and that"
            " you may read it"
        ) from error
    return source


def check_dataset(name: str, root: Path | None, options: Mapping[str, Any] | None = None) -> str:
    """Read a source from end to end and say what is in it, for `remanence data check`."""
    source = load_dataset(name, options or {}, root)
    per_class = np.bincount(source.train.y, minlength=len(source.classes))
    shown = ", ".join(source.classes[:10]) + (
        f" and {len(source.classes) - 10} more" if len(source.classes) > 10 else ""
    )
    lines = [
        f"{source.name}: {source.note}",
        f"  examples  {len(source.train)} for training, {len(source.test)} for testing",
        f"  one is    {source.kind} {'x'.join(map(str, source.shape))}, {source.train.x.dtype}",
        f"  classes   {len(source.classes)} ({shown}), {per_class.min()} to"
        f" {per_class.max()} training examples each",
    ]
    if source.train.groups is not None:
        per_group = np.unique(source.train.groups, return_counts=True)[1]
        lines.append(
            f"  groups    {len(source.group_names)}, {per_group.min()} to {per_group.max()}"
            " training examples each"
        )
    return "\n".join(lines)
