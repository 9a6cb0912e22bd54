"""Can the clients of two runs train in one stack? They can if the same function computes the steps
of both: if the runs differ only in data, seeds and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.config import Experiment, optimizer_call
from remanence.core import expressions, pytree
from remanence.core.types import ClientStats
from remanence.data.batches import Examples
from remanence.experiment.build import BuiltExperiment
from remanence.training.task import TrainingTask


def can_batch(one: BuiltExperiment, other: BuiltExperiment) -> bool:
    """Do the clients of both runs compute the same function, of different data and numbers?"""
    a, b = one.task, other.task
    if any(
        p.centralized for p in a.method.parts
    ):  # pooled data must be a single client, without padding
        return False
    return (
        static_settings(one.config, a) == static_settings(other.config, b)
        and replace(a.info, max_client_size=0, public_size=0)
        == replace(b.info, max_client_size=0, public_size=0)
        and _shapes(a) == _shapes(b)
        and _same_batches(a, b)
        and _same_examples(a.train, b.train)
        and _same_examples(a.test, b.test)
    )


def static_settings(config: Experiment, task: TrainingTask) -> dict[str, Any]:
    """Settings that must not differ; of a number, only whether it is 0, which switches it off."""
    call, local = optimizer_call(config), config.local
    return {
        "parts": [
            (p.name, _without_numbers(p.arguments, p.hyper), sorted(p.hyper))
            for p in task.method.parts
        ],
        "optimizer": (
            call.name,
            _without_numbers(call.arguments, task.optimizer.hparams),
            _without_numbers(task.optimizer.hparams, task.optimizer.hparams),
        ),
        "local": (local.epochs, local.steps, local.batch_size, local.drop_last, local.buffers),
        "model": config.model,
        "precision": (config.precision, config.device, config.deterministic),
    }


def _without_numbers(arguments: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    return {name: value == 0 if name in numbers else value for name, value in arguments.items()}


def batch_key(config: Experiment) -> str:
    """Equal where two runs could share a stack, by their settings alone."""
    settings = config.model_dump(
        mode="json",
        exclude={"seed": True, "data": {"partition"}, "local": {"lr", "schedule", "optimizer"}},
    )
    settings["method"] = [call.name for call in expressions.parse_parts(config.method)]
    settings["local"]["optimizer"] = optimizer_call(config).name
    return json.dumps(settings, sort_keys=True)


def _shapes(task: TrainingTask) -> dict[str, Any]:
    """Names, shapes and dtypes of the model, of client states and of payloads."""
    nothing = torch.zeros((), dtype=task.info.dtype, device=task.info.device)
    stats = ClientStats(nothing, nothing.expand(task.info.num_classes))
    client_state = {
        p.name: p.client_state(task.model.initial, stats, task.info)
        for p in task.method.parts
        if p.client_state is not None
    }
    whole = {
        "params": task.model.initial.params,
        "buffers": task.model.initial.buffers,
        "client_state": client_state,
        "payload": task.payload_spec(),
    }
    return {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pytree.flatten(whole).items()
    }


def _same_batches(one: TrainingTask, other: TrainingTask) -> bool:
    """Batch norm allows no padding: clients of all sizes must be in both runs."""
    if not one.model.depends_on_batch:
        return True
    sizes = [
        [np.unique(client_data.train.sizes).tolist() for client_data in task.population.time_steps]
        for task in (one, other)
    ]
    return sizes[0] == sizes[1]


def _same_examples(one: Examples, other: Examples) -> bool:
    return (one.dtype, one.augment) == (other.dtype, other.augment) and all(
        _same(getattr(one, name), getattr(other, name))
        for name in ("x", "y", "mean", "std", "storage_index")
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (
        one is not None
        and other is not None
        and one.shape == other.shape
        and torch.equal(one, other)
    )
