"""The local steps of a stack of clients in one phase: what is stacked, which examples each step
uses, and how the steps run eagerly.

`captured_steps.py` captures and replays the same steps; both must give what `sequential` gives.
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
from remanence.core.contexts import Context
from remanence.core.pytree import Params
from remanence.core.rng import fold_in_batch
from remanence.core.types import Batch, ModelState
from remanence.engines.client_plan import to_device
from remanence.training.client_step import TrainState, train_step
from remanence.training.gradients import grad_func
from remanence.training.task import ClientIndices, TrainingTask

# (state, fixed parameters, batch, examples, context), all of them stacks -> state, loss [k]
StepAll = Callable[[TrainState, Params, Batch, ClientIndices, Context], tuple[TrainState, Tensor]]


class StackState(NamedTuple):
    """The clients of a stack in a phase, or those at its front that still have steps to make."""

    state: TrainState
    fixed: Params  # parameters that the phase does not train
    loss: Tensor  # [k], summed over steps
    rows: ClientIndices
    ctx: Context

    def cut(self, part: slice, dims: Context) -> StackState:
        """Some of the clients; what has no client axis in `dims` stays whole."""
        rest: Any = (_cut(value, part) for value in self[:-1])
        return StackState._make((*rest, _cut_where(self.ctx, dims, part)))


class BatchSchedule(NamedTuple):
    """The batches and random keys of each step of a phase.

    Clients are sorted by their number of steps, the most first.
    """

    ids: Tensor  # [k, steps, batch]; shorter batches are padded with their first example
    batch_sizes: np.ndarray  # [k, steps] examples that count; 0 after a client's last step
    keys: np.ndarray  # [k, steps] int64

    @property
    def steps(self) -> np.ndarray:
        """How many steps each client makes. -> [k]"""
        steps: np.ndarray = np.count_nonzero(self.batch_sizes, axis=1)
        return steps

    @property
    def active_at(self) -> np.ndarray:
        """How many clients make each step. -> [steps]"""
        active: np.ndarray = np.count_nonzero(self.batch_sizes, axis=0)
        return active


def make_schedule(
    ids: Tensor, positions: np.ndarray, batch_sizes: np.ndarray, keys: np.ndarray
) -> BatchSchedule:
    """The planned batches of a phase as ids of examples on the device.

    Args:
        ids: [k, n] of each client's examples.
        positions: [k, steps, batch] of the batches' examples among those of the client.
        batch_sizes: [k, steps]
        keys: [k] the clients' random keys in this phase.
    """
    chosen = torch.gather(ids, 1, to_device(positions.reshape(len(positions), -1), ids.device))
    step_keys = fold_in_batch(keys[:, None], np.arange(batch_sizes.shape[1]))
    return BatchSchedule(chosen.reshape(positions.shape), batch_sizes, step_keys.view(np.int64))


def map_step(task: TrainingTask, dims: Context) -> StepAll:
    """The local step of one client, mapped over a stack of clients."""
    return vmap(partial(train_step, task, grad_func), in_dims=(0, 0, 0, 0, dims))


def make_batch(task: TrainingTask, ids: Tensor, batch_sizes: Tensor, key: Tensor) -> Batch:
    """Gather and augment examples on the device. ids: [k, B]; batch_sizes: [k, 1]; key: [k]"""
    weight = (torch.arange(ids.shape[1], device=ids.device) < batch_sizes).to(task.info.dtype)
    return Batch(task.train.augmented(ids, key), task.train.labels(ids), weight, ids)


def run_eagerly(
    task: TrainingTask, dims: Context, active: StackState, schedule: BatchSchedule
) -> tuple[TrainState, Tensor]:
    """Run step by step; a client leaves the stack after its last step.

    Returns:
        The state and the summed loss [k] of all clients, in their order.
    """
    step_all, device = map_step(task, dims), schedule.ids.device
    batch_sizes, step_keys = (
        torch.from_numpy(each).to(device) for each in (schedule.batch_sizes, schedule.keys)
    )
    numbers = torch.arange(schedule.batch_sizes.shape[1], device=device)
    done: list[StackState] = []
    for step, count in enumerate(schedule.active_at.tolist()):
        if count < len(active.loss):
            done.append(active.cut(slice(count, None), dims))
            active = active.cut(slice(0, count), dims)
        width = int(schedule.batch_sizes[:count, step].max())
        step_ctx = active.ctx._replace(step=numbers[step], key=step_keys[:count, step])
        batch = make_batch(
            task, schedule.ids[:count, step, :width], batch_sizes[:count, step, None], step_ctx.key
        )
        state, loss = step_all(active.state, active.fixed, batch, active.rows, step_ctx)
        active = active._replace(state=state, loss=active.loss + loss)
    done.append(active)
    # the clients with most steps are first in the stack and end last
    in_order = done[::-1]
    whole: Any = (
        pytree.concatenate(parts) for parts in zip(*(part.state for part in in_order), strict=True)
    )
    return TrainState(*whole), torch.cat([part.loss for part in in_order])


def round_up(count: int) -> int:
    """The next power of two, so that few lengths occur; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def context_dims(per_client_start: bool) -> Context:
    """Which parts of a stacked context have the clients as leading axis: `in_dims` of `vmap`."""
    each, shared = 0, None
    dims: dict[str, Any] = dict.fromkeys(Context._fields, each)
    dims |= dict.fromkeys(
        ("round", "broadcast", "step", "hyper", "optimizer_hparams", "info"), shared
    )
    start: Any = (each if per_client_start else shared, each)
    return Context(**dims | {"start": ModelState(*start)})


def shares_start(dims: Context) -> bool:
    """Whether all clients of a stack start from the same parameters."""
    return dims.start.params is None


def _cut(value: Any, part: slice) -> Any:
    """Some of the clients of anything that is stacked."""
    if isinstance(value, dict):
        return pytree.take(value, part)
    return (
        type(value)(*(_cut(item, part) for item in value))
        if isinstance(value, tuple)
        else value[part]
    )


def _cut_where(value: Any, dims: Any, part: slice) -> Any:
    """Some of the clients, of those values that have a client axis in `dims`."""
    if isinstance(dims, tuple):
        return type(value)(
            *(_cut_where(item, dim, part) for item, dim in zip(value, dims, strict=True))
        )
    return value if dims is None else _cut(value, part)
