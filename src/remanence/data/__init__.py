"""Data: read a dataset, partition it over clients, and let it drift.

- `dataset.py`: `ArrayDataset` and `DatasetSplit`, what every reader returns.
- Readers, one file a format: `sklearn_digits`, `mnist_idx`, `cifar`, `cinic`, `svhn_mat`,
  `leaf_json`, `image_folders`, `synthetic`; for your own data `user_data` (npz), `tables`, `hub`,
  `pfllib` and, from Python, `torch_dataset`, which all end in `own_arrays`. Files that we do not
  trust are parsed by `npz_reader`, `mat_reader`, `restricted_pickle`, `fast_json`.
- `naming.py`: what a text such as `patients.csv(label=outcome)` means.
- `downloads.py` (addresses and hashes), `fetch.py`, `http_download.py`: `remanence data fetch`.
  `files.py` finds the files of a dataset.
- `partitions.py`, `structured_partitions.py`: which client gets which training examples;
  `splits.py`: public, validation and test sets; without drift, `split_train_valid` splits each
  client's examples of the partition into training and validation examples.
- `population.py`: `ClientData`, the examples of every client at one time step.
- `drift_schedules.py`: the cluster of each client at each time step. `concepts.py`: the data
  distribution of each cluster, written with `concept_rules.py`; `cluster_options.py` parses their
  options. `concept_views.py`: transformed inputs and labels. `schedule_table.py`: a schedule from a
  CSV file. `drift_sampling.py`: the examples of each client at each time step, drawn from the pools
  of `example_pools.py`.
- `batches.py`: local batches, normalization and augmentation on the device.

`DATASETS` and `PARTITIONS` below list everything that an experiment can name. This package imports
from `remanence.core` only. `experiment/data_setup.py` puts the pieces together for a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import Call, instantiate
from remanence.core.imports import is_import_path
from remanence.data.cifar import cifar10, cifar100
from remanence.data.cinic import cinic10
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.data.hub import hub
from remanence.data.image_folders import folder, pacs
from remanence.data.leaf_json import femnist, mnist_by_writer
from remanence.data.mnist_idx import emnist, fashion_mnist, mnist
from remanence.data.partitions import (
    Partition,
    dirichlet,
    dirichlet_by_class,
    iid,
    quantity,
    shards,
)
from remanence.data.pfllib import pfllib
from remanence.data.sklearn_digits import digits
from remanence.data.splits import hold_out
from remanence.data.structured_partitions import by_group, label_clusters
from remanence.data.svhn_mat import svhn
from remanence.data.synthetic import synthetic, tokens
from remanence.data.tables import table
from remanence.data.torch_dataset import from_dataset
from remanence.data.user_data import npz

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ArrayDataset",
    "DatasetSplit",
    "Partition",
    "describe_dataset",
    "from_dataset",
    "hold_out",
    "load_dataset",
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
    "hub": hub,
    "mnist": mnist,
    "mnist_by_writer": mnist_by_writer,
    "npz": npz,
    "pacs": pacs,
    "pfllib": pfllib,
    "svhn": svhn,
    "synthetic": synthetic,
    "table": table,
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
    """Read a dataset by name.

    Args:
        name: a key of `DATASETS`, or the import path of a function that returns data.
        options: keyword arguments of the reader.
        root: the data folder; default: the environment variable REMANENCE_DATA.

    Returns:
        The dataset in memory.
    """
    if root is None and os.environ.get("REMANENCE_DATA"):
        root = Path(os.environ["REMANENCE_DATA"])
    if is_import_path(name):
        made = instantiate(Call(name, options), {}, "dataset")
        return made if isinstance(made, ArrayDataset) else from_dataset(made, name=name)
    try:
        dataset: ArrayDataset = instantiate(
            Call(name, options),
            DATASETS,
            "dataset",
            None if root is None else Path(root).expanduser(),
        )
    except OSError as error:
        raise InputError(
            f"dataset {name!r} cannot be read ({error}): check that the file is there and that"
            " you may read it"
        ) from error
    return dataset


def describe_dataset(dataset: ArrayDataset) -> str:
    """Return a summary of a dataset, for `remanence data check`."""
    per_class = np.bincount(dataset.train.y, minlength=len(dataset.classes))
    shown = _listed(dataset.classes)
    lines = [
        f"{dataset.name}: {dataset.note}",
        f"  examples  {len(dataset.train)} for training, {len(dataset.test)} for testing",
        f"  one is    {dataset.kind} {'x'.join(map(str, dataset.shape))}, {dataset.train.x.dtype}",
        f"  classes   {len(dataset.classes)} ({shown}), {per_class.min()} to"
        f" {per_class.max()} training examples each",
    ]
    if dataset.train.groups is not None:
        per_group = np.unique(dataset.train.groups, return_counts=True)[1]
        lines.append(
            f"  {'sites ' if dataset.by_site else 'groups'}    {len(dataset.group_names)}"
            f" ({_listed(dataset.group_names)}), {per_group.min()} to {per_group.max()}"
            " training examples each"
        )
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
