"""Many clients as one: their models stacked along a leading axis, every step of all of them one batched computation.

Clients are sorted by size, so that those with steps left are always a prefix of the stack: who is done leaves it, and nobody computes for the idle. A batch
is padded only where widths differ within a step; an equal short last batch runs as a narrower stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence import trees
from remanence.data.batches import Plan, plan_batches
from remanence.engines import common
from remanence.errors import InputError
from remanence.keys import Key
from remanence.local import Progress, SplitRows, Task, begin, differentiate_functional, finish, first_progress, keep_or_revert, take_step
from remanence.trees import Params, Tree
from remanence.types import Batch, Context, Job, Phase, Reply, Scores, Start

SCORE_ROWS = 500


class Stacked:
    """`stack` is the most clients trained together; the result does not depend on it."""

    name = "stacked"

    def __init__(self, task: Task, stack: int = 64):
        self.task, self.stack = task, stack
        refuse_padded_batch_norm(task)
        refuse_unstackable(task)

    def train(self, job: Job) -> Iterator[Reply]:
        sizes = self.task.population.at(job.time_step).train.sizes[job.clients]
        order = np.argsort(-sizes, kind="stable")
        for first in range(0, len(order), self.stack):
            yield self._train_stack(job, order[first : first + self.stack])

    def _train_stack(self, job: Job, places: np.ndarray) -> Reply:
        """places: positions in the cohort, largest client first"""
        task, clients = self.task, job.clients[places]
        ctx, rows = common.make_context(task, job, torch.from_numpy(places)), self._rows(job, clients)
        if not job.personal_start:  # batch norm writes into buffers even before the first step: every client needs its own
            ctx = ctx._replace(start=Start(ctx.start.params, trees.expand(ctx.start.buffers, len(clients))))
        dims = context_dims(job.personal_start)
        kept, total, losses = ctx.own, np.zeros(len(clients), dtype=np.int64), torch.zeros(())
        model, own, extras = vmap(partial(begin, task, differentiate_functional), in_dims=(0, dims))(rows, common.at(ctx, "before"))
        if job.personal_start or task.method.personal(task.world):
            ctx, dims = ctx._replace(start=model), context_dims(True)
        ctx = ctx._replace(own=own)
        for number, phase in enumerate(task.phases):
            plans = [common.plan_phase(task, job, int(client), number, phase) for client in clients]
            steps = np.array([len(plan.widths) for plan in plans])
            now, old = common.enter_phase(ctx, number, torch.from_numpy(steps).to(task.world.device)), model
            model, memory, losses = self._train_phase(model, now, dims, phase, plans, rows)
            ctx = ctx._replace(memory=memory)
            total += steps
            if phase.accept is not None:
                accept = partial(keep_or_revert, task, differentiate_functional, common.scoped_accept(task, phase))
                model = vmap(accept, in_dims=(0, 0, 0, dims))(rows, old, model, common.at(now, "accept"))
        end = common.at(ctx, "after", torch.from_numpy(total).to(task.world.device))
        close = partial(finish, task, differentiate_functional)
        own, extras = vmap(close, in_dims=(0, 0, 0, 0, dims))(rows, model, extras, kept, end)
        return common.make_reply(task, job, clients, model, extras, own, losses)

    def _train_phase(
        self, model: Start, ctx: Context, dims: Context, phase: Phase, plans: list[Plan], rows: SplitRows
    ) -> tuple[Start, Tree, Tensor]:
        """-> the trained models, what was tracked, the mean loss of each client"""
        task, device, names = self.task, self.task.world.device, self.task.trained_names(phase)
        steps = np.array([len(plan.widths) for plan in plans])
        places, widths = _pad_plans(plans)
        places_on_device = torch.from_numpy(places).to(device)
        params = trees.clone(trees.restrict(model.params, names))
        frozen = {name: value for name, value in model.params.items() if name not in params}
        start_all = vmap(partial(first_progress, task, differentiate_functional), in_dims=(0, 0, 0, 0, dims))
        first = start_all(params, frozen, model.buffers, rows, ctx)
        live = Live(first, frozen, torch.zeros(len(plans), dtype=task.world.dtype, device=device), rows, ctx)
        done: list[Live] = []
        step_all = vmap(partial(take_step, task, differentiate_functional), in_dims=(0, 0, 0, 0, dims))
        for step in range(int(steps.max())):
            count = int((steps > step).sum())
            if count < len(live.loss):
                done.append(live.cut(slice(count, None), dims))
                live = live.cut(slice(0, count), dims)
            width = int(widths[:count, step].max())
            chosen = torch.gather(live.rows.train, 1, places_on_device[:count, step, :width])
            now = common.enter_step(live.ctx, step)
            weight = torch.from_numpy(np.arange(width) < widths[:count, step, None]).to(device=device, dtype=task.world.dtype)
            batch = Batch(task.train.augmented(chosen, now.key), task.train.labels(chosen), weight, chosen)
            progress, loss = step_all(live.progress, live.fixed, batch, live.rows, now)
            live = live._replace(progress=progress, loss=live.loss + loss)
        done.append(live)
        last_first = done[::-1]  # the clients with most steps are at the front of the stack and finish last
        params, buffers, _, memory = (trees.concatenate(parts) for parts in zip(*(part.progress for part in last_first), strict=True))
        whole = {**frozen, **params}
        loss = torch.cat([part.loss for part in last_first]) / torch.from_numpy(steps).to(device)
        return Start({name: whole[name] for name in model.params}, buffers), memory, loss

    def _rows(self, job: Job, clients: np.ndarray) -> SplitRows:
        holdings = self.task.population.at(job.time_step)
        train, train_weight = self._pad_rows([holdings.train.of(int(client)) for client in clients], holdings.train.of(int(clients[0]))[0])
        valid, valid_weight = self._pad_rows([holdings.valid.of(int(client)) for client in clients], holdings.train.of(int(clients[0]))[0])
        return SplitRows(train, train_weight, valid, valid_weight)

    def _pad_rows(self, parts: list[np.ndarray], filler: int) -> tuple[Tensor, Tensor]:
        """-> ids [k, longest], weight [k, longest]"""
        sizes = np.array([len(part) for part in parts])
        ids = np.full((len(parts), sizes.max()), filler, dtype=np.int64)
        for row, part in zip(ids, parts, strict=True):
            row[: len(part)] = part
        weight = np.arange(ids.shape[1]) < sizes[:, None]
        return torch.from_numpy(ids).to(self.task.world.device), torch.from_numpy(weight).to(self.task.world.device, self.task.world.dtype)

    @torch.no_grad()
    def score(self, models: Start, split: str, owners: np.ndarray | None = None, time_step: int = 0) -> Scores:
        ids, groups, count = common.rows_to_score(self.task, split, owners, time_step)
        examples = common.examples_of(self.task, split)
        many = len(next(iter(models.params.values())))
        tally = common.Tally(many, count, self.task.world.classes, ids.device)
        for part, group in zip(torch.split(ids, SCORE_ROWS), torch.split(groups, SCORE_ROWS), strict=True):
            x, y = examples.inputs(part), examples.labels(part)
            for first in range(0, many, self.stack):
                some = models.take(slice(first, first + self.stack))
                logits = vmap(lambda model, x=x: self.task.model.judge_rows(model, x).logits)(some)  # [m, n, C]
                for number, of_model in enumerate(logits):
                    tally.add(first + number, of_model, y, group)
        return tally.scores()

    def close(self) -> None:
        pass


class Live(NamedTuple):
    """The clients of a stack that still have steps to make."""

    progress: Progress
    fixed: Params
    loss: Tensor  # [k], summed over steps
    rows: SplitRows
    ctx: Context

    def cut(self, part: slice, dims: Context) -> Live:
        """Some of the clients; what `dims` says all of them share stays whole."""
        ctx: Any = (_cut_where(value, dim, part) for value, dim in zip(self.ctx, dims, strict=True))
        rest: Any = (_cut(value, part) for value in self[:-1])
        return Live._make((*rest, Context(*ctx)))


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, dict):
        return trees.take(value, part)
    return type(value)(*(_cut(item, part) for item in value)) if isinstance(value, tuple) else value[part]


def _cut_where(value: Any, dims: Any, part: slice) -> Any:
    if isinstance(dims, tuple):
        return type(value)(*(_cut_where(item, dim, part) for item, dim in zip(value, dims, strict=True)))
    return value if dims is None else _cut(value, part)


def context_dims(personal_start: bool) -> Context:
    """Which parts of a stacked context have the clients as leading axis, as vmap wants to be told."""
    each, same = 0, None
    dims: dict[str, Any] = dict.fromkeys(Context._fields, each)
    dims |= dict.fromkeys(("round", "shared", "step", "hyper", "rule", "world"), same)
    start: Any = (each if personal_start else same, each)
    return Context(**dims | {"start": Start(*start)})


def _pad_plans(plans: list[Plan]) -> tuple[np.ndarray, np.ndarray]:
    """-> rows [k, steps, batch], widths [k, steps]; a client whose batch is smaller than the others' repeats its first row"""
    steps, batch = max(len(plan.widths) for plan in plans), max(plan.rows.shape[1] for plan in plans)
    rows, widths = np.zeros((len(plans), steps, batch), dtype=np.int64), np.zeros((len(plans), steps), dtype=np.int64)
    for number, plan in enumerate(plans):
        mine, wide = plan.rows.shape
        rows[number, :mine, :wide] = plan.rows
        rows[number, :mine, wide:] = plan.rows[:, :1]
        widths[number, :mine] = plan.widths
    return rows, widths


def needs_padding(task: Task) -> bool:
    """Do two clients ever have batches of different width at the same step?"""
    for holdings in task.population.steps:
        for phase in task.phases:
            seen: dict[int, int] = {}
            for size in np.unique(holdings.train.sizes):
                widths = plan_batches(Key(0), int(size), task.batch, phase.epochs, phase.steps, task.drop_last).widths
                if any(seen.setdefault(step, int(width)) != width for step, width in enumerate(widths)):
                    return True
    return False


def refuse_padded_batch_norm(task: Task) -> None:
    """Padded rows would enter the statistics of batch norm."""
    if task.model.mixes_rows and needs_padding(task):
        raise InputError(
            "engine stacked cannot train this model with batch norm: the clients' sizes differ, and rows that pad a batch would enter its statistics;"
            " use engine=loop, clients of equal size, local.drop_last=true, or a model with group norm"
        )


def refuse_unstackable(task: Task) -> None:
    """Some layers cannot be mapped over a stack: better found on two rows than in the middle of a run."""
    two = Start(*(trees.expand(tree, 2) for tree in task.model.initial))
    x = task.train.inputs(torch.zeros(2, 2, dtype=torch.int64, device=task.world.device))
    key = torch.zeros(2, dtype=torch.int64, device=task.world.device)

    def loss(params: Params, buffers: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        out, new = task.model.apply(params, buffers, x, key)
        return out.logits.sum(), new

    try:
        vmap(torch.func.grad(loss, has_aux=True))(*two, x, key)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"engine stacked cannot run this model, because torch cannot map it over a stack ({reason}): use engine=loop"
        ) from error
