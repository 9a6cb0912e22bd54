"""What a stack consists of: clients of one run or, where runs of one method train together, of
several runs.

Runs that share a stack differ in the data of their clients, in seeds and in numbers. Values that
differ have the clients as leading axis; equal ones have no client axis, since mapping over it takes
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.contexts import Context
from remanence.core.engine import ClientWork
from remanence.core.pytree import Tree
from remanence.core.slots import Phase
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.engines import client_plan
from remanence.engines.vector_steps import context_dims
from remanence.training.task import ClientIndices, TrainingTask


class RunWork(NamedTuple):
    """The work of a run, and its task."""

    task: TrainingTask
    work: ClientWork

    @property
    def sizes(self) -> np.ndarray:
        """Training examples of each client of the cohort. -> [k]"""
        return np.asarray(
            self.task.population.at(self.work.time_step).train.sizes[self.work.clients]
        )


class RunSlice(NamedTuple):
    """The clients of one run in a stack."""

    run: RunWork
    indices: np.ndarray  # of each client in the cohort
    positions: np.ndarray  # of each client in the stack
    clients: np.ndarray
    keys: np.ndarray  # uint64: their random keys in this round


def sort_by_size(works: Sequence[RunWork]) -> np.ndarray:
    """All clients of all runs, largest first.

    Returns:
        [total, 2] int64: which run, which client of its cohort.
    """
    run = np.repeat(np.arange(len(works)), [len(work.work.clients) for work in works])
    index = np.concatenate([np.arange(len(work.work.clients)) for work in works])
    order = np.argsort(-np.concatenate([work.sizes for work in works]), kind="stable")
    return np.stack([run, index], axis=1)[order]


def split_by_run(works: Sequence[RunWork], members: np.ndarray) -> list[RunSlice]:
    """The clients of a stack, by run. members: [k, 2], as `sort_by_size` returns them"""
    slices = []
    for number, work in enumerate(works):
        positions = np.flatnonzero(members[:, 0] == number)
        if len(positions):
            indices = members[positions, 1]
            clients = work.work.clients[indices]
            keys = client_plan.client_keys(work.work, clients)
            slices.append(RunSlice(work, indices, positions, clients, keys))
    return slices


def count_clients(slices: Sequence[RunSlice]) -> int:
    """The size of a stack."""
    return sum(len(each.indices) for each in slices)


def make_context(slices: Sequence[RunSlice]) -> tuple[Context, Context]:
    """-> the context of the stack, and which parts of it have the clients as leading axis"""
    contexts = [
        client_plan.make_context(s.run.task, s.run.work, torch.from_numpy(s.indices))
        for s in slices
    ]
    if len(contexts) == 1:
        return contexts[0], context_dims(slices[0].run.work.per_client_start)
    starts = [_stacked_start(s, ctx.start) for s, ctx in zip(slices, contexts, strict=True)]
    differ = [
        name
        for name in ("round", "hyper", "optimizer_hparams")
        if not _equal([getattr(ctx, name) for ctx in contexts])
    ]
    differ += ["broadcast"] if any(pytree.flatten(ctx.broadcast) for ctx in contexts) else []
    joined: dict[str, Any] = {
        name: _join(slices, [getattr(ctx, name) for ctx in contexts])
        for name in ("client", "key", "steps", "client_state")
    }
    joined["stats"] = ClientStats(
        *(_join(slices, list(each)) for each in zip(*(c.stats for c in contexts), strict=True))
    )
    joined["start"] = ModelState(
        *(_join(slices, list(trees)) for trees in zip(*starts, strict=True))
    )
    for name in differ:
        joined[name] = _join(
            slices,
            [
                _expand(getattr(ctx, name), len(s.indices))
                for s, ctx in zip(slices, contexts, strict=True)
            ],
        )
    dims: dict[str, Any] = dict.fromkeys(differ, 0)
    return contexts[0]._replace(**joined), context_dims(True)._replace(**dims)


def rows_of(slices: Sequence[RunSlice]) -> ClientIndices:
    """The examples of all clients of the stack, padded to equal length."""
    device, dtype = slices[0].run.task.info.device, slices[0].run.task.info.dtype
    train: list[np.ndarray] = [np.empty(0, np.int64)] * count_clients(slices)
    valid = list(train)
    for s in slices:
        data = s.run.task.population.at(s.run.work.time_step)
        for position, client in zip(s.positions.tolist(), s.clients.tolist(), strict=True):
            train[position] = data.train.for_client(client)
            valid[position] = data.valid.for_client(client)
    filler = int(train[0][0])
    return ClientIndices(
        *pad_rows(train, filler, device, dtype), *pad_rows(valid, filler, device, dtype)
    )


def pad_rows(
    rows: Sequence[np.ndarray], filler: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Examples of different numbers as one table.

    Args:
        rows: The ids of k clients' examples.
        filler: The id that pads them.
        device: Of the results.
        dtype: Of the weights.

    Returns:
        ids [k, longest], weight [k, longest]: 1, or 0 where padded
    """
    sizes = np.array([len(part) for part in rows])
    ids = np.full((len(rows), sizes.max()), filler, dtype=np.int64)
    for row, part in zip(ids, rows, strict=True):
        row[: len(part)] = part
    weight = np.arange(ids.shape[1]) < sizes[:, None]
    return client_plan.to_device(ids, device), client_plan.to_device(weight, device).to(dtype)


def plan(slices: Sequence[RunSlice], number: int, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """The batches of all clients in one phase.

    Returns:
        Positions among each client's examples [k, steps, batch], and batch sizes [k, steps], which
        are 0 after a client's last step.
    """
    plans = [
        client_plan.plan_phases(s.run.task, s.run.work, s.clients, s.keys, number, phase)
        for s in slices
    ]
    if len(plans) == 1:
        return plans[0]
    count = count_clients(slices)
    steps, batch = (max(each.shape[axis] for each, _ in plans) for axis in (1, 2))
    positions = np.zeros((count, steps, batch), dtype=np.int64)
    batch_sizes = np.zeros((count, steps), dtype=np.int64)
    for s, (own, sizes) in zip(slices, plans, strict=True):
        padded = np.zeros((len(own), steps, batch), dtype=np.int64)
        padded[:, : own.shape[1], : own.shape[2]] = own
        # pad with a real example, as within one run
        padded[:, : own.shape[1], own.shape[2] :] = own[:, :, :1]
        positions[s.positions] = padded
        batch_sizes[s.positions, : sizes.shape[1]] = sizes
    return positions, batch_sizes


def phase_keys(slices: Sequence[RunSlice], number: int) -> np.ndarray:
    """Every client's random key in one phase. -> uint64 [k]"""
    keys = np.empty(count_clients(slices), dtype=np.uint64)
    for s in slices:
        keys[s.positions] = client_plan.phase_keys(s.keys, number)
    return keys


def make_replies(
    slices: Sequence[RunSlice], model: ModelState, payload: Tree, client_state: Tree, loss: Tensor
) -> list[Reply]:
    """The replies of a stack, one for each run."""
    replies = []
    for s in slices:
        some: slice | Tensor = (
            slice(None) if len(slices) == 1 else torch.from_numpy(s.positions).to(loss.device)
        )
        replies.append(
            client_plan.make_reply(
                s.run.task,
                s.run.work,
                s.clients,
                model.select(some),
                pytree.take(payload, some),
                pytree.take(client_state, some),
                loss[some],
            )
        )
    return replies


def _stacked_start(run_slice: RunSlice, start: ModelState) -> ModelState:
    """A model for each client, also where the run has one for all."""
    if run_slice.run.work.per_client_start:
        return start
    return ModelState(*(pytree.broadcast(tree, len(run_slice.indices)) for tree in start))


def _expand(value: Any, count: int) -> Any:
    """The same for each of `count` clients."""
    return pytree.broadcast(value, count) if isinstance(value, dict) else value.expand(count)


def _join(slices: Sequence[RunSlice], values: Sequence[Any]) -> Any:
    """Stacks of single runs as one stack, every client at its position."""
    positions = np.concatenate([s.positions for s in slices])
    order = torch.from_numpy(np.argsort(positions))
    if isinstance(values[0], dict):
        return pytree.map(lambda x: x[order.to(x.device)], pytree.concatenate(values))
    return torch.cat(list(values))[order.to(values[0].device)]


def _equal(values: Sequence[Any]) -> bool:
    first, *others = (
        pytree.flatten(value) if isinstance(value, dict) else {"": value} for value in values
    )
    return all(torch.equal(first[name], other[name]) for other in others for name in first)
