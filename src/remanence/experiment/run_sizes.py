"""The sizes of a run, from which `resources.py` estimates what it needs: from its settings and data
before the model is built, and then from its task. Models are measured by shapes alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import nn

from remanence.config import Experiment
from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.imports import is_import_path
from remanence.core.types import ClientStats, ModelState
from remanence.data.batches import count_steps
from remanence.data.dataset import ArrayDataset
from remanence.experiment.data_setup import population_sizes
from remanence.experiment.networks import build_module
from remanence.experiment.resources import RunSizes
from remanence.experiment.task_checks import sample_size
from remanence.training.task import TrainingTask


def sizes_before_building(
    config: Experiment,
    method: ComposedMethod,
    dataset: ArrayDataset,
    model: str | nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> RunSizes:
    """The sizes that follow from settings and data.

    Args:
        config: The settings.
        method: The method.
        dataset: The data.
        model: The name of the model, or the user's module.
        device: Of the models and examples.
        dtype: Of the parameters.
    """
    record, sizes = config.record, population_sizes(config, dataset)
    return sizes._replace(
        cohort=min(sample_size(config, sizes.clients), sizes.clients),
        model=model_bytes(model, dataset.shape, len(dataset.classes), dtype),
        decentralized=method.part_filling("peers") is not None,
        own=0 if config.engine == "flower" else None,
        remote=config.engine == "ray",
        gpu=device.type == "cuda",
        every=record.every,
        local_every=(record.local_every or record.every) if record.local else 0,
        cross=record.cross,
        validation=record.validation and config.data.validation > 0,
        confusion=record.confusion,
        examples=record.examples,
    )


def sizes_of_task(sizes: RunSizes, task: TrainingTask, cohort: int) -> RunSizes:
    """The sizes with those that follow from the task.

    Args:
        sizes: As known before.
        task: The task.
        cohort: The clients that a round samples.
    """
    info, initial = task.info, task.model.initial
    size = info.max_client_size
    steps = [
        count_steps(size, task.batch_size, phase.epochs, phase.steps, task.drop_last)
        for phase in task.phases
    ]
    return sizes._replace(
        clients=info.num_clients,
        cohort=cohort,
        model=sum(map(pytree.nbytes, initial)),
        reply=pytree.nbytes(pytree.select_keys(initial.params, task.communicated_params()))
        + pytree.nbytes(pytree.select_keys(initial.buffers, task.communicated_buffers()))
        + pytree.nbytes(task.payload_spec()),
        client_state=_client_state_bytes(task),
        steps=max(steps),
        batch=min(task.batch_size, size),
        concepts=task.population.num_concepts,
        gpu=info.device.type == "cuda",
    )


def model_bytes(
    model: str | nn.Module, shape: tuple[int, ...], classes: int, dtype: torch.dtype
) -> int:
    """Bytes of the parameters and buffers; 0 for a user's model that is not built yet, whose code
    may need more than shapes.

    Args:
        model: The name of the model, or the user's module.
        shape: Of one example.
        classes: The number of classes.
        dtype: Of the parameters.
    """
    if isinstance(model, str):
        if is_import_path(model):
            return 0
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build_module(model, shape, classes)
    count = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    return count * dtype.itemsize


def _client_state_bytes(task: TrainingTask) -> int:
    """Bytes that a client keeps, by the shapes of its first state."""
    initial, meta = task.model.initial, torch.device("meta")
    start = ModelState(*(pytree.to(tree, meta) for tree in initial))
    info = replace(task.info, device=meta)
    stats = ClientStats(
        torch.zeros((), dtype=info.dtype, device=meta),
        torch.zeros(info.num_classes, dtype=info.dtype, device=meta),
    )
    total = pytree.nbytes(task.personal_state(initial))
    for part in task.method.parts:
        if part.client_state is not None:
            # a user's part that needs values, which raises nearly anything, is left out
            with contextlib.suppress(Exception):
                total += pytree.nbytes(part.client_state(start, stats, info))
    return total
