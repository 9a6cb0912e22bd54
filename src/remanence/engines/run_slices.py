"""What a stack is made of: clients of one run or, where runs of one method train together, of
several.

Runs that share a stack differ in data of their clients, in seeds and in numbers. Whatever differs
gets the clients as leading axis; what is the same for all of them stays single, because mapping
over it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.pytree import Tree
from remanence.core.slots import Context, Phase
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.engines import client_plan
from remanence.engines.vector_steps import context_dims
from remanence.training.task import ClientIndices, TrainingTask


class RunWork(NamedTuple):
    """A job, and the task of the run it belongs to."""

    task: TrainingTask
    work: ClientWork

    @property
    def sizes(self) -> np.ndarray:
        """Training rows of each client of the cohort. -> [k]"""
        return np.asarray(
            self.task.population.at(self.work.time_step).train.sizes[self.work.clients]
        )


class RunSlice(NamedTuple):
    """The clients of one run in a stack."""

    run: RunWork
    places: np.ndarray  # in the cohort
    positions: np.ndarray  # where in the stack each of them stands
    clients: np.ndarray
    keys: np.ndarray  # uint64: their randomness in this round


def sort_by_size(works: Sequence[RunWork]) -> np.ndarray:
    """All clients of all runs, largest first. -> [total, 2] int64: which work, which place in
    its cohort
    """
    owner = np.repeat(np.arange(len(works)), [len(work.work.clients) for work in works])
    place = np.concatenate([np.arange(len(work.work.clients)) for work in works])
    order = np.argsort(-np.concatenate([work.sizes for work in works]), kind="stable")
    return np.stack([owner, place], axis=1)[order]


def split_by_run(works: Sequence[RunWork], members: np.ndarray) -> list[RunSlice]:
    """The stack of these members, by run. members: [k, 2]"""
    portions = []
    for number, work in enumerate(works):
        seats = np.flatnonzero(members[:, 0] == number)
        if len(seats):
            clients = work.work.clients[members[seats, 1]]
            portions.append(
                RunSlice(
                    work,
                    members[seats, 1],
                    seats,
                    clients,
                    client_plan.client_keys(work.work, clients),
                )
            )
    return portions


def make_context(portions: Sequence[RunSlice]) -> tuple[Context, Context]:
    """-> the context of the stack, and which parts of it have the clients as leading axis"""
    parts = [
        client_plan.make_context(p.run.task, p.run.work, torch.from_numpy(p.places))
        for p in portions
    ]
    if len(parts) == 1:
        return parts[0], context_dims(portions[0].run.work.per_client_start)
    starts = [_own_start(p, ctx.start) for p, ctx in zip(portions, parts, strict=True)]
    differ = [
        name
        for name in ("round", "hyper", "optimizer_hparams")
        if not _equal([getattr(ctx, name) for ctx in parts])
    ]
    differ += ["broadcast"] if any(pytree.flatten(ctx.broadcast) for ctx in parts) else []
    joined: dict[str, Any] = {
        name: _join(portions, [getattr(ctx, name) for ctx in parts])
        for name in ("client", "key", "steps", "client_state")
    }
    joined["stats"] = ClientStats(
        *(_join(portions, list(facts)) for facts in zip(*(ctx.stats for ctx in parts), strict=True))
    )
    joined["start"] = ModelState(
        *(_join(portions, list(kind)) for kind in zip(*starts, strict=True))
    )
    for name in differ:
        joined[name] = _join(
            portions,
            [
                _spread(getattr(ctx, name), len(p.places))
                for p, ctx in zip(portions, parts, strict=True)
            ],
        )
    dims: dict[str, Any] = dict.fromkeys(differ, 0)
    return parts[0]._replace(**joined), context_dims(True)._replace(**dims)


def rows_of(portions: Sequence[RunSlice]) -> ClientIndices:
    """The rows of all clients of the stack, padded to equal length."""
    device, dtype = portions[0].run.task.info.device, portions[0].run.task.info.dtype
    count = sum(len(p.places) for p in portions)
    train: list[np.ndarray] = [np.empty(0, np.int64)] * count
    valid = list(train)
    for p in portions:
        holdings = p.run.task.population.at(p.run.work.time_step)
        for seat, client in zip(p.positions.tolist(), p.clients.tolist(), strict=True):
            train[seat], valid[seat] = (
                holdings.train.for_client(client),
                holdings.valid.for_client(client),
            )
    filler = int(train[0][0])
    return ClientIndices(
        *pad_rows(train, filler, device, dtype), *pad_rows(valid, filler, device, dtype)
    )


def pad_rows(
    parts: Sequence[np.ndarray], filler: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """-> ids [k, longest], weight [k, longest]"""
    sizes = np.array([len(part) for part in parts])
    ids = np.full((len(parts), sizes.max()), filler, dtype=np.int64)
    for row, part in zip(ids, parts, strict=True):
        row[: len(part)] = part
    weight = np.arange(ids.shape[1]) < sizes[:, None]
    return client_plan.to_device(ids, device), client_plan.to_device(weight, device).to(dtype)


def plan(portions: Sequence[RunSlice], number: int, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """The batches of all clients in one phase: rows [k, steps, batch] and widths [k, steps],
    which are 0 where a client is done.
    """
    plans = [
        client_plan.plan_phases(p.run.task, p.run.work, p.clients, p.keys, number, phase)
        for p in portions
    ]
    if len(plans) == 1:
        return plans[0]
    count = sum(len(p.places) for p in portions)
    steps, batch = (max(rows.shape[axis] for rows, _ in plans) for axis in (1, 2))
    places, widths = (
        np.zeros((count, steps, batch), dtype=np.int64),
        np.zeros((count, steps), dtype=np.int64),
    )
    for p, (rows, wide) in zip(portions, plans, strict=True):
        mine = np.zeros((len(rows), steps, batch), dtype=np.int64)
        mine[:, : rows.shape[1], : rows.shape[2]] = rows
        # a real row again, as within one run
        mine[:, : rows.shape[1], rows.shape[2] :] = rows[:, :, :1]
        places[p.positions] = mine
        widths[p.positions, : wide.shape[1]] = wide
    return places, widths


def phase_keys(portions: Sequence[RunSlice], number: int) -> np.ndarray:
    """Every client's randomness in one phase. -> uint64 [k]"""
    values = np.empty(sum(len(p.places) for p in portions), dtype=np.uint64)
    for p in portions:
        values[p.positions] = client_plan.phase_keys(p.keys, number)
    return values


def make_replies(
    portions: Sequence[RunSlice], model: ModelState, extras: Tree, own: Tree, loss: Tensor
) -> list[Reply]:
    """What each run's clients send back."""
    replies = []
    for p in portions:
        mine: slice | Tensor = (
            slice(None) if len(portions) == 1 else torch.from_numpy(p.positions).to(loss.device)
        )
        parts = model.select(mine), pytree.take(extras, mine), pytree.take(own, mine), loss[mine]
        replies.append(client_plan.make_reply(p.run.task, p.run.work, p.clients, *parts))
    return replies


def _own_start(portion: RunSlice, start: ModelState) -> ModelState:
    """A model for each client, whether the run gave them one each or one for all."""
    return (
        start
        if portion.run.work.per_client_start
        else ModelState(*(pytree.broadcast(tree, len(portion.places)) for tree in start))
    )


def _spread(value: Any, count: int) -> Any:
    """The same for each of so many clients."""
    return pytree.broadcast(value, count) if isinstance(value, dict) else value.expand(count)


def _join(portions: Sequence[RunSlice], values: Sequence[Any]) -> Any:
    """Stacks of single runs as one, every client in its seat."""
    seats = np.concatenate([p.positions for p in portions])
    order = torch.from_numpy(np.argsort(seats))
    if isinstance(values[0], dict):
        return pytree.map(lambda x: x[order.to(x.device)], pytree.concatenate(values))
    return torch.cat(list(values))[order.to(values[0].device)]


def _equal(values: Sequence[Any]) -> bool:
    first, *others = (
        pytree.flatten(value) if isinstance(value, dict) else {"": value} for value in values
    )
    return all(torch.equal(first[name], other[name]) for other in others for name in first)
