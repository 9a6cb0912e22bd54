"""Can the clients of a task train as a stack? This is checked without building an engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence.core import pytree
from remanence.core.errors import InputError, first_line
from remanence.core.pytree import Params
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.data.batches import plan_batches
from remanence.training.task import TrainingTask

UNKEYED = "it draws random numbers of its own in training, such as attention with dropout"


def check_stackable(task: TrainingTask) -> None:
    """Raise `InputError` where the clients of a task cannot train as a stack."""
    if task.model.draws_unkeyed:
        raise InputError(
            f"engine vectorized cannot train this model: {UNKEYED}; use engine=sequential, or"
            " layers of nn.Dropout"
        )
    _reject_padded_batch_norm(task)
    _reject_unmappable_model(task)


def needs_padding(task: TrainingTask) -> bool:
    """Do two clients ever have batches of different sizes at the same step?"""
    for client_data in task.population.time_steps:
        for phase in task.phases:
            size_at: dict[int, int] = {}
            for count in np.unique(client_data.train.sizes):
                sizes = plan_batches(
                    Key(0), int(count), task.batch_size, phase.epochs, phase.steps, task.drop_last
                ).batch_sizes
                if any(
                    size_at.setdefault(step, int(size)) != size for step, size in enumerate(sizes)
                ):
                    return True
    return False


def _reject_padded_batch_norm(task: TrainingTask) -> None:
    """Raise `InputError` if padding would enter the statistics of batch norm."""
    if task.model.depends_on_batch and needs_padding(task):
        raise InputError(
            "engine vectorized cannot train this model with batch norm: the clients' sizes"
            " differ, and examples that pad a batch would enter its statistics;"
            " use engine=sequential, clients of equal size, local.drop_last=true, or a model"
            " with group norm"
        )


def _reject_unmappable_model(task: TrainingTask) -> None:
    """Raise `InputError` if a layer has no rule for `vmap`, by a trial on two examples."""
    two = ModelState(*(pytree.broadcast(tree, 2) for tree in task.model.initial))
    x = task.train.inputs(torch.zeros(2, 2, dtype=torch.int64, device=task.info.device))
    key = torch.zeros(2, dtype=torch.int64, device=task.info.device)

    def loss(params: Params, buffers: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        out, new = task.model.apply(params, buffers, x, key)
        return out.logits.sum(), new

    try:
        vmap(torch.func.grad(loss, has_aux=True))(*two, x, key)
    except RuntimeError as error:
        raise InputError(
            "engine vectorized cannot run this model, because torch cannot map it over a"
            f" stack ({first_line(error)}): use engine=sequential"
        ) from error
