"""Training at the server, on its public set: what FedDF and Flashback borrow.

Inputs are used as they are, without augmentation, so that what teachers say about a row can be computed once and looked up by its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence import trees
from remanence.data.batches import plan_batches
from remanence.keys import Key
from remanence.local import Task, differentiate_plain, weighted_mean
from remanence.trees import Params, Tree
from remanence.types import Batch, Context, Facts, Fit, Optimiser, Output, Reply, ServerLent, Start

JUDGED_ROWS = 250  # rows that all teachers see at once
CHECKS = 20  # how often within the patience the validation rows are looked at


def lend_server(task: Task, rule: dict[str, float], key: Key, local_models: Callable[[Reply], Start]) -> ServerLent:
    """What a server-side part may call; `rule` are the clients' numbers in this round."""
    ids = task.public.to(task.world.device)
    return ServerLent(make_fit(task, rule, key), lambda models: judge_public(task, models), task.train.labels(ids), local_models)


@torch.no_grad()
def judge_public(task: Task, models: Start) -> Tensor:
    """Stacked models on the whole public set. -> logits [m, n, C]"""
    ids = task.public.to(task.world.device)
    many = len(next(iter(models.params.values())))
    parts = []
    for some in torch.split(ids, JUDGED_ROWS):
        x = task.train.inputs(some)
        if many == 1:
            one = models.take(0)
            parts.append(task.model.judge_rows(one, x).logits.unsqueeze(0))
        else:
            parts.append(vmap(lambda model, x=x: task.model.judge_rows(model, x).logits)(models))
    return torch.cat(parts, dim=1)


def make_fit(task: Task, rule: dict[str, float], key: Key) -> Fit:
    """The lent function itself; every call draws its own batches."""
    calls = itertools.count()

    def fit(
        model: Start,
        loss: Callable[[Output, Batch, Tensor], Tensor],
        *,
        epochs: int = 0,
        steps: int = 0,
        batch: int = 0,
        optimiser: Optimiser | None = None,
        cosine: bool = False,
        validation: float = 0.0,
        patience: int = 0,
    ) -> Start:
        here, used = key.fold("call", next(calls)), optimiser or task.optimiser
        rates = dict(rule) if optimiser is None else dict(optimiser.numbers)
        order = here.fold("validation").permutation(len(task.public))
        held = round(validation * len(order))
        watched, places = np.sort(order[:held]), np.sort(order[held:])
        size = min(batch or task.batch, len(places))
        lonely = task.model.mixes_rows and size > 1 and len(places) % size == 1  # batch norm cannot train on a last batch of one row
        plan = plan_batches(here.fold("plan"), len(places), size, epochs, steps, drop_last=lonely)
        names = task.sent_names()
        params, buffers = trees.restrict(model.params, names), model.buffers
        fixed = {name: value for name, value in model.params.items() if name not in names}
        slots, best, best_right, best_step = used.init(params), model, -1, 0
        total = len(plan.widths)
        for step, width in enumerate(plan.widths):
            place = torch.from_numpy(places[plan.rows[step, :width]])
            numbers = rates | ({"lr": rates["lr"] * (1 + math.cos(math.pi * step / total)) / 2} if cosine else {})
            ctx = _context(task, model, task.tensors(numbers), step, here.fold("step", step))
            objective = _objective(task, loss, fixed, buffers, _batch(task, place), place.to(task.world.device), ctx)
            grads, buffers = differentiate_plain(objective, params)
            params, slots = used.step(params, grads, slots, ctx)
            if patience and held and ((step + 1) % max(1, patience // CHECKS) == 0 or step + 1 == total):
                now = Start(model.params | params, buffers)
                right = _count_right(task, now, torch.from_numpy(watched))
                if right > best_right:
                    best, best_right, best_step = now, right, step
                elif step - best_step >= patience:
                    break
        return best if patience and held else Start(model.params | params, buffers)

    return fit


def _objective(
    task: Task, loss: Callable[[Output, Batch, Tensor], Tensor], fixed: Params, buffers: Params, batch: Batch, place: Tensor, ctx: Context
) -> Callable[[Params], tuple[Tensor, Tree]]:
    def objective(params: Params) -> tuple[Tensor, Tree]:
        out, new = task.model.apply({**fixed, **params}, buffers, batch.x, ctx.key)
        return weighted_mean(loss(out, batch, place), batch.weight), new

    return objective


def _batch(task: Task, place: Tensor) -> Batch:
    ids = task.public[place].to(task.world.device)
    weight = torch.ones(len(ids), dtype=task.world.dtype, device=ids.device)
    return Batch(task.train.inputs(ids), task.train.labels(ids), weight, ids)


@torch.no_grad()
def _count_right(task: Task, model: Start, place: Tensor) -> int:
    right = 0
    for some in torch.split(place, 1000):
        batch = _batch(task, some)
        right += int((task.model.judge_rows(model, batch.x).logits.argmax(dim=1) == batch.y).sum())
    return right


def _context(task: Task, start: Start, rule: dict[str, Tensor], step: int, key: Key) -> Context:
    """An optimiser asks only for its numbers; the server has no client and no facts."""
    nobody, now = torch.tensor(-1), torch.tensor(step)
    return Context(nobody, now, start, {}, {}, {}, Facts(now, now), now, now, {}, rule, key.tensor().to(task.world.device), task.world)
