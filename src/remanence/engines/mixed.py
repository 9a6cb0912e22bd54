"""A stack for the CPU, of which only that is stacked which gains by it.

Stacked convolutions are grouped ones, which a CPU computes at little more than half the speed of plain ones; small dense layers spend their time around the
arithmetic, which a stack shares. So steps that train convolutions are taken client by client, and those behind a fixed front, or of a network without
convolutions, by all clients at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from remanence import trees
from remanence.data.batches import Examples
from remanence.engines.fronts import Split
from remanence.engines.stacked import Stacked
from remanence.engines.steps import Course, Live, cut, cut_where
from remanence.engines.tuned_loop import ROOM, TunedLoop
from remanence.local import Progress, SplitRows, Task, differentiate_plain, keep_or_revert
from remanence.types import Accept, Context, Start


class Mixed(Stacked):
    """As `Stacked`, with the same options."""

    def __init__(self, task: Task, stack: int = 64, steps: str = "auto"):
        super().__init__(task, stack, steps)
        self.one_by_one = TunedLoop(task, self.steps)

    def _take_steps(self, task: Task, number: int, dims: Context, live: Live, course: Course) -> tuple[Progress, Tensor]:
        split = self.one_by_one.find_split(tuple(live.progress.params))
        if split is not None and split.width * live.rows.train.numel() <= ROOM:
            return self._take_behind(split, task, number, dims, live, course)
        return self._take_here(task, number, dims, live, course)

    def _take_behind(self, split: Split, task: Task, number: int, dims: Context, live: Live, course: Course) -> tuple[Progress, Tensor]:
        """The steps of the rear, on what every client's own front makes of its rows."""
        buffers, clients = live.progress.buffers, len(live.loss)
        models = Start({**live.fixed, **live.progress.params}, buffers)
        seen = torch.cat([split.look_at(models.take(client), task.train, live.rows.train[client]) for client in range(clients)])
        own = Examples(seen, task.train.labels(live.rows.train.reshape(-1)), None, None, task.train.dtype)  # [clients * rows, ...]
        place = torch.empty(len(task.train.y), dtype=torch.int64)  # never read at other rows
        places = torch.empty_like(course.ids)
        for client, ids in enumerate(live.rows.train):
            place[ids] = torch.arange(client * len(ids), (client + 1) * len(ids))
            places[client] = place[course.ids[client]]
        short = live._replace(progress=live.progress._replace(buffers=split.rear_of(buffers)), fixed=split.rear_of(live.fixed))
        behind = replace(task, model=split.rear, train=own)
        progress, loss = self._take_here(behind, number, dims, short, course._replace(ids=places))
        return progress._replace(buffers=buffers | progress.buffers), loss

    def _take_here(self, task: Task, number: int, dims: Context, live: Live, course: Course) -> tuple[Progress, Tensor]:
        if any(isinstance(layer, nn.Conv2d) for layer in task.model.trainer.modules()):
            return self._take_one_by_one(task, dims, live, course)
        for known in self.recordings:
            known.task = task if known.phase == number else known.task  # the same steps, on the rows of this stack
        return super()._take_steps(task, number, dims, live, course)

    def _keep_or_revert(self, accept: Accept, rows: SplitRows, old: Start, new: Start, ctx: Context, dims: Context) -> Start:
        if not self.task.model.has_convolutions:
            return super()._keep_or_revert(accept, rows, old, new, ctx, dims)
        decide = partial(keep_or_revert, self.one_by_one.judging, differentiate_plain, accept)
        clients = range(len(ctx.client))
        return Start.stack([decide(cut(rows, one), old.take(one), new.take(one), cut_where(ctx, dims, one)) for one in clients])

    def _take_one_by_one(self, task: Task, dims: Context, live: Live, course: Course) -> tuple[Progress, Tensor]:
        ends, losses = [], []
        for client, steps in enumerate(course.steps.tolist()):
            progress, fixed, _, rows, ctx = live.cut(client, dims)
            ids, widths = course.ids[client, :steps], course.widths[client, :steps]
            end, loss = self.one_by_one.step_through(task, progress, fixed, ctx, rows, ids, widths)
            ends.append(end)
            losses.append(torch.stack(loss).sum())
        self.fallback = self.one_by_one.fallback
        stacked: Any = (trees.stack(parts) for parts in zip(*ends, strict=True))
        return Progress(*stacked), torch.stack(losses)
