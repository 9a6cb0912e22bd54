"""From `ClientWork` to what clients compute: contexts, random keys, plans of batches, replies.

Every engine uses these functions, so that all give the same results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree, rng
from remanence.core.compose import BoundHook
from remanence.core.contexts import Context
from remanence.core.engine import ClientWork
from remanence.core.pytree import Tree
from remanence.core.slots import Accept, Phase
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.data.batches import BatchPlan, count_steps, plan_batches, plan_batches_many
from remanence.training.task import TrainingTask


def make_context(task: TrainingTask, work: ClientWork, index: int | Tensor) -> Context:
    """The context of one client of the cohort, or of a stack of clients.

    Args:
        task: What is trained.
        work: The work of the round.
        index: Of the client in the cohort; a tensor [k] for a stack.
    """
    device = task.info.device
    clients = work.clients[index if isinstance(index, int) else index.numpy()]
    values = client_keys(work, np.atleast_1d(clients)).view(np.int64).reshape(clients.shape)
    client, key = to_device(np.stack([clients, values]), device).unbind()
    device_index = index if isinstance(index, int) else to_device(index.numpy(), device)
    return Context(
        client=client,
        round=torch.full((), work.round, dtype=torch.int64, device=device),
        start=work.start.select(index) if work.per_client_start else work.start,
        broadcast=work.broadcast,
        client_state=pytree.take(work.client_state, device_index),
        tracker_state={},
        stats=ClientStats(*(value[device_index] for value in work.stats)),
        step=torch.zeros((), dtype=torch.int64, device=device),
        steps=torch.zeros_like(client),
        hyper=task.hparam_tensors(),
        optimizer_hparams=task.tensors(work.optimizer_hparams),
        key=key,
        info=task.info,
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array without waiting for earlier work of the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def at_hook(ctx: Context, hook: str, steps: int | Tensor | None = None) -> Context:
    """The context of a hook outside the steps, with a random key of its own."""
    return ctx._replace(
        steps=ctx.steps if steps is None else torch.zeros_like(ctx.steps) + steps,
        key=rng.fold_in(ctx.key, hook),
    )


def at_phase(ctx: Context, number: int, steps: int | Tensor) -> Context:
    """The context of a phase: its number of steps, and a random key of its own."""
    return ctx._replace(
        steps=torch.zeros_like(ctx.steps) + steps,
        key=rng.fold_in(rng.fold_in(ctx.key, "phase"), number),
    )


def client_keys(work: ClientWork, clients: np.ndarray) -> np.ndarray:
    """Each client's random key in a round. -> uint64 [k]"""
    return rng.fold_in_batch(work.key.fold_in("client"), clients)


def phase_keys(keys: np.ndarray, number: int) -> np.ndarray:
    """The clients' random keys in a phase, as `at_phase` makes them. uint64 [k] -> uint64 [k]"""
    return rng.fold_in_batch(keys, "phase", number)


def plan_phase(
    task: TrainingTask, work: ClientWork, client: int, number: int, phase: Phase
) -> BatchPlan:
    """The batches of one client in one phase: a function of its key and its number of examples."""
    count = len(task.population.at(work.time_step).train.for_client(client))
    key = work.key.fold_in("client", client, "plan", number)
    return plan_batches(key, count, task.batch_size, phase.epochs, phase.steps, task.drop_last)


def plan_phases(
    task: TrainingTask,
    work: ClientWork,
    clients: np.ndarray,
    keys: np.ndarray,
    number: int,
    phase: Phase,
) -> tuple[np.ndarray, np.ndarray]:
    """The batches of many clients in one phase, as one plan.

    Args:
        task: What is trained.
        work: The work of the round.
        clients: [k]
        keys: [k] their random keys in the round.
        number: Of the phase.
        phase: The phase itself.

    Returns:
        Positions among each client's examples [k, steps, batch], and batch sizes [k, steps], which
        are 0 after a client's last step.
    """
    sizes = task.population.at(work.time_step).train.sizes[clients]
    return plan_batches_many(
        rng.fold_in_batch(keys, "plan", number),
        sizes,
        task.batch_size,
        phase.epochs,
        phase.steps,
        task.drop_last,
    )


def expected_steps(task: TrainingTask, work: ClientWork) -> np.ndarray:
    """Local steps of each client of the cohort over all phases. -> [k]"""
    return count_local_steps(task, work.clients, work.time_step, phases_of(task, work))


def count_local_steps(
    task: TrainingTask, clients: np.ndarray, time_step: int, phases: Sequence[Phase]
) -> np.ndarray:
    """Local steps of clients [k] over some phases, with their data of a time step. -> [k]"""
    sizes = task.population.at(time_step).train.sizes[clients]
    return np.array(
        [
            sum(
                count_steps(int(n), task.batch_size, p.epochs, p.steps, task.drop_last)
                for p in phases
            )
            for n in sizes
        ]
    )


def phases_of(task: TrainingTask, work: ClientWork) -> tuple[Phase, ...]:
    """The phases that a round trains."""
    return task.phases[: work.num_phases or None]


def scoped_accept(task: TrainingTask, phase: Phase) -> Accept:
    """A phase's `accept`, bound to the subtree of the part that has the phases."""
    part = task.method.part_filling("phases")
    assert phase.accept is not None
    return phase.accept if part is None else BoundHook(part, phase.accept)


def make_reply(
    task: TrainingTask,
    work: ClientWork,
    clients: np.ndarray,
    model: ModelState,
    payload: Tree,
    client_state: Tree,
    loss: Tensor,
) -> Reply:
    """The reply of k clients; all trees are stacked [k, ...]."""
    sizes, device = task.population.at(work.time_step).train.sizes[clients], task.info.device
    return Reply(
        client=to_device(clients.astype(np.int64), device),
        round=torch.full((len(clients),), work.round, dtype=torch.int64, device=device),
        params=pytree.select_keys(model.params, task.communicated_params()),
        buffers=pytree.select_keys(model.buffers, task.communicated_buffers()),
        payload=payload,
        weight=to_device(sizes.astype(np.float64), device),
        client_state=client_state,
        loss=loss,
    )
