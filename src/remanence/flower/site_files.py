"""Reads the data that site.toml names: files, or what a function of the site returns."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from remanence.config import Experiment
from remanence.core.errors import InputError
from remanence.core.imports import is_import_path
from remanence.data import from_dataset
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.experiment.data_setup import load_data
from remanence.flower.refusals import Declined
from remanence.flower.settings import SiteFile


def read_client(
    site: SiteFile, config: Experiment, client: int, expected: Mapping[str, Any]
) -> ArrayDataset:
    """Read a client's data and compare them with the experiment's.

    Args:
        site: The site's settings.
        config: The experiment.
        client: The client's number.
        expected: The coordinator's description of examples.

    Returns:
        The data with the experiment's classes, and without groups.
    """
    dataset = load_client(site, config, client)
    classes, shape = [str(name) for name in expected["classes"]], tuple(expected["shape"])
    mismatch = (
        f"the examples of client {client} do not have the kind, shape and classes of the"
        " experiment; see the site's log"
    )
    if dataset.kind != expected["kind"] or dataset.shape != shape:
        raise Declined(
            "data",
            mismatch,
            f"client {client} has {dataset.kind} examples of shape {dataset.shape}, but the"
            f" experiment has {expected['kind']} examples of shape {shape}",
        )
    unknown = next((name for name in dataset.classes if name not in classes), None)
    if unknown is not None:
        raise Declined(
            "data",
            mismatch,
            f"client {client} has a class {unknown!r}, but the experiment has {', '.join(classes)}",
        )
    label = np.array([classes.index(name) for name in dataset.classes], dtype=np.int64)
    train, test = (DatasetSplit(split.x, label[split.y]) for split in (dataset.train, dataset.test))
    return replace(dataset, classes=tuple(classes), train=train, test=test, group_names=())


def load_client(site: SiteFile, config: Experiment, client: int) -> ArrayDataset:
    """The data that site.toml names for a client."""
    text = site.clients[client]
    if is_import_path(text):
        return _call(site, client, text)
    # the coordinator does not decide how much memory a site may use
    data = {"name": text, "dir": str(site.path.parent), "max_bytes": 0, "limit": 0, "test_limit": 0}
    return load_data(config.model_copy(update={"data": config.data.model_copy(update=data)}))


def _call(site: SiteFile, client: int, text: str) -> ArrayDataset:
    """Call the site's own function. Only site.toml can name it, never the coordinator. The text of
    an error that it raises may contain data, so it is not made part of a reason.
    """
    module, _, name = text.partition(":")
    folder = str(site.path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind()
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(
            f"{site.path}: data.{client} = {text!r} cannot be called ({error}): name a"
            " function without arguments as package.module:function"
        ) from error
    result: Any = function()
    if isinstance(result, ArrayDataset):
        return result
    return from_dataset(result, name=f"client {client}")


def join_datasets(datasets: Sequence[ArrayDataset]) -> ArrayDataset:
    """All examples of a site, with a group for each of its clients."""

    def join(splits: Sequence[DatasetSplit]) -> DatasetSplit:
        groups = np.repeat(np.arange(len(splits)), [len(split) for split in splits])
        x, y = (np.concatenate([getattr(split, name) for split in splits]) for name in "xy")
        return DatasetSplit(x, y, groups)

    first, names = datasets[0], tuple(str(group) for group in range(len(datasets)))
    train = join([dataset.train for dataset in datasets])
    test = join([dataset.test for dataset in datasets])
    return ArrayDataset("site", first.kind, first.classes, train, test, group_names=names)
