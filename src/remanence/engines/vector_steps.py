"""The local steps of a stack of clients, one phase long: what is stacked, which rows each step
sees, and the plain way to run it.

`cuda_graphs.py` runs the same steps recorded; both must give what `sequential` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence.core import pytree
from remanence.core.pytree import Params
from remanence.core.slots import Context
from remanence.core.types import Batch, ModelState
from remanence.training.client_step import TrainState, train_step
from remanence.training.gradients import grad_func
from remanence.training.task import ClientIndices, TrainingTask

# (progress, fixed, batch, rows, context), all of them stacks -> progress, loss [k]
StepAll = Callable[[TrainState, Params, Batch, ClientIndices, Context], tuple[TrainState, Tensor]]


class ActiveClients(NamedTuple):
    """The clients of a stack that still have steps to make."""

    state: TrainState
    fixed: Params
    loss: Tensor  # [k], summed over steps
    rows: ClientIndices
    ctx: Context

    def cut(self, part: slice, dims: Context) -> ActiveClients:
        """Some of the clients; what `dims` says all of them share stays whole."""
        rest: Any = (_cut(value, part) for value in self[:-1])
        return ActiveClients._make((*rest, _cut_where(self.ctx, dims, part)))


class BatchSchedule(NamedTuple):
    """Which rows the clients of a stack see in each step of a phase, and what they draw from;
    the client with most steps stands first.
    """

    ids: Tensor  # [k, steps, batch]; beyond a width, a real row again
    batch_sizes: np.ndarray  # [k, steps] how many of them count; 0 where a client is done
    keys: np.ndarray  # [k, steps] int64

    @property
    def steps(self) -> np.ndarray:
        """How many steps each client makes. -> [k]"""
        steps: np.ndarray = np.count_nonzero(self.batch_sizes, axis=1)
        return steps

    @property
    def active_at(self) -> np.ndarray:
        """How many clients are still there in each step. -> [steps]"""
        live: np.ndarray = np.count_nonzero(self.batch_sizes, axis=0)
        return live


def map_step(task: TrainingTask, dims: Context) -> StepAll:
    """The local step of one client, for a stack of them."""
    return vmap(partial(train_step, task, grad_func), in_dims=(0, 0, 0, 0, dims))


def make_batch(task: TrainingTask, ids: Tensor, widths: Tensor, key: Tensor) -> Batch:
    """Gathered and augmented where the data are. ids: [k, B]; widths: [k, 1]; key: [k]"""
    weight = (torch.arange(ids.shape[1], device=ids.device) < widths).to(task.info.dtype)
    return Batch(task.train.augmented(ids, key), task.train.labels(ids), weight, ids)


def run_eagerly(
    task: TrainingTask, dims: Context, live: ActiveClients, course: BatchSchedule
) -> tuple[TrainState, Tensor]:
    """Step by step, the stack shrinking as clients end. -> progress and summed loss of all of
    them, in their order
    """
    step_all, device = map_step(task, dims), course.ids.device
    widths, step_keys = (
        torch.from_numpy(each).to(device) for each in (course.batch_sizes, course.keys)
    )
    numbers = torch.arange(course.batch_sizes.shape[1], device=device)
    done: list[ActiveClients] = []
    for step, count in enumerate(course.active_at.tolist()):
        if count < len(live.loss):
            done.append(live.cut(slice(count, None), dims))
            live = live.cut(slice(0, count), dims)
        width = int(course.batch_sizes[:count, step].max())
        now = live.ctx._replace(step=numbers[step], key=step_keys[:count, step])
        batch = make_batch(
            task, course.ids[:count, step, :width], widths[:count, step, None], now.key
        )
        progress, loss = step_all(live.state, live.fixed, batch, live.rows, now)
        live = live._replace(state=progress, loss=live.loss + loss)
    done.append(live)
    # the clients with most steps are at the front of the stack and finish last
    last_first = done[::-1]
    whole: Any = (
        pytree.concatenate(parts)
        for parts in zip(*(part.state for part in last_first), strict=True)
    )
    return TrainState(*whole), torch.cat([part.loss for part in last_first])


def round_up(count: int) -> int:
    """The next power of two, so that few lengths occur; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def context_dims(personal_start: bool) -> Context:
    """Which parts of a stacked context have the clients as leading axis, as vmap wants to be
    told.
    """
    each, same = 0, None
    dims: dict[str, Any] = dict.fromkeys(Context._fields, each)
    dims |= dict.fromkeys(
        ("round", "broadcast", "step", "hyper", "optimizer_hparams", "info"), same
    )
    start: Any = (each if personal_start else same, each)
    return Context(**dims | {"start": ModelState(*start)})


def _cut(value: Any, part: slice) -> Any:
    """Some of the clients of whatever is stacked."""
    if isinstance(value, dict):
        return pytree.take(value, part)
    return (
        type(value)(*(_cut(item, part) for item in value))
        if isinstance(value, tuple)
        else value[part]
    )


def _cut_where(value: Any, dims: Any, part: slice) -> Any:
    """The same, where `dims` says that there is a clients' axis."""
    if isinstance(dims, tuple):
        return type(value)(
            *(_cut_where(item, dim, part) for item, dim in zip(value, dims, strict=True))
        )
    return value if dims is None else _cut(value, part)
