"""One client after the other in this process, by plain autograd: the oracle every other engine
must equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from remanence.core import memory_format, pytree, rng
from remanence.core.pytree import Params, Tree
from remanence.core.types import Batch, Context, Job, PairScores, Phase, Reply, Scores, Start
from remanence.data.batches import Plan
from remanence.engines import base
from remanence.training.client_step import (
    Progress,
    SplitRows,
    Task,
    begin,
    differentiate_plain,
    finish,
    first_progress,
    keep_or_revert,
    take_step,
)

FETCHED = 2**22  # bytes of the batches that are fetched together


class Loop:
    """`channels_last` lays images out as convolutions on a CPU like them; it changes no result
    beyond rounding.
    """

    name = "loop"
    steps = "eager"

    def __init__(self, task: Task, channels_last: bool = False):
        self.task, self.channels_last = task, channels_last
        self.judging = task  # the same, for looking at rows without training

    def train(self, job: Job) -> Iterator[Reply]:
        for place in range(len(job.clients)):
            yield self.train_client(job, place)

    def train_client(self, job: Job, place: int) -> Reply:
        """The whole round of the client at this place of the cohort, as a stack of one."""
        task, client = self.task, int(job.clients[place])
        ctx, rows = base.make_context(task, job, place), self._rows(job, client)
        kept, total, losses = ctx.own, 0, torch.zeros(())
        model, own, extras = begin(task, differentiate_plain, rows, base.at(ctx, "before"))
        ctx = ctx._replace(own=own, start=model)
        for number, phase in enumerate(base.phases_of(task, job)):
            plan, old = base.plan_phase(task, job, client, number, phase), model
            now = base.enter_phase(ctx, number, len(plan.widths))
            model, memory, losses = self._train_phase(model, now, phase, plan, rows)
            ctx = ctx._replace(memory=memory)
            total += len(plan.widths)
            if phase.accept is not None:
                accept = base.scoped_accept(task, phase)
                model = keep_or_revert(
                    self.judging,
                    differentiate_plain,
                    accept,
                    rows,
                    old,
                    model,
                    base.at(now, "accept"),
                )
        own, extras = finish(
            task, differentiate_plain, rows, model, extras, kept, base.at(ctx, "after", total)
        )
        return base.make_reply(
            task, job, np.array([client]), *_stack_of_one(model, extras, own, losses.mean())
        )

    def _train_phase(
        self, model: Start, ctx: Context, phase: Phase, plan: Plan, rows: SplitRows
    ) -> tuple[Start, Tree, Tensor]:
        """-> the trained model, what was tracked, the loss of every step"""
        task, names = self.task, self.task.trained_names(phase)
        params = pytree.restrict(model.params, names)
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if self.channels_last:
            params, fixed = (
                {name: memory_format.lay_out(value) for name, value in tree.items()}
                for tree in (params, fixed)
            )
        first = first_progress(task, differentiate_plain, params, fixed, model.buffers, rows, ctx)
        ids = rows.train[torch.from_numpy(plan.rows).to(rows.train.device)]  # [steps, batch]
        progress, losses = self.take_steps(task, first, fixed, ctx, rows, ids, plan.widths)
        whole = {**fixed, **progress.params}
        trained = Start({name: whole[name].contiguous() for name in model.params}, progress.buffers)
        return trained, progress.memory, torch.stack(losses)

    def take_steps(
        self,
        task: Task,
        progress: Progress,
        fixed: Params,
        ctx: Context,
        rows: SplitRows,
        ids: Tensor,
        widths: np.ndarray,
    ) -> tuple[Progress, list[Tensor]]:
        """ids: [steps, batch]; widths: [steps], how many of them count -> progress, the loss of
        every step
        """
        losses = []
        for batch, number, key in self.see_batches(task, ctx, ids, widths):
            progress, loss = take_step(
                task,
                differentiate_plain,
                progress,
                fixed,
                batch,
                rows,
                ctx._replace(step=number, key=key),
            )
            losses.append(loss)
        return progress, losses

    def see_batches(
        self, task: Task, ctx: Context, ids: Tensor, widths: np.ndarray
    ) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """The batch, the number and the key of every step; the rows of some steps are fetched
        together, which is faster.
        """
        numbers = torch.arange(len(ids), device=ids.device)
        step_keys, ones = (
            rng.fold_in(ctx.key, numbers),
            torch.ones(ids.shape[1], dtype=task.world.dtype, device=ids.device),
        )
        together = max(1, FETCHED // (ids.shape[1] * task.train.x[0].numel() * ones.element_size()))
        for first in range(0, len(ids), together):
            some = slice(first, first + together)
            # [steps * batch, ...]
            rows = self.lay_out(task.train.augmented(ids[some], step_keys[some]).flatten(0, 1))
            x, y = rows.reshape(*ids[some].shape, *rows.shape[1:]), task.train.labels(ids[some])
            for place, width in enumerate(widths[some].tolist()):
                batch = Batch(
                    x[place, :width], y[place, :width], ones[:width], ids[first + place, :width]
                )
                yield batch, numbers[first + place], step_keys[first + place]

    def lay_out(self, x: Tensor) -> Tensor:
        return memory_format.lay_out(x) if self.channels_last else x

    def _rows(self, job: Job, client: int) -> SplitRows:
        holdings, device, dtype = (
            self.task.population.at(job.time_step),
            self.task.world.device,
            self.task.world.dtype,
        )
        train, valid = (
            torch.from_numpy(rows.of(client)).to(device)
            for rows in (holdings.train, holdings.valid)
        )
        return SplitRows(
            train,
            torch.ones(len(train), dtype=dtype, device=device),
            valid,
            torch.ones(len(valid), dtype=dtype, device=device),
        )

    @torch.no_grad()
    def score(
        self, models: Start, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> Scores:
        return self.score_rows(
            models, split, *base.rows_to_score(self.task, split, owners, time_step)
        )

    @torch.no_grad()
    def score_rows(
        self, models: Start, split: str, ids: Tensor, groups: Tensor, count: int
    ) -> Scores:
        """Score on given rows of a split; groups: [n] below count."""
        examples = base.examples_of(self.task, split)
        many = models.many
        tally = base.Tally(many, count, self.task.world.classes, ids.device)
        singles = [models.take(number) for number in range(many)]
        for part, group in zip(
            torch.split(ids, base.CACHED_ROWS),
            torch.split(groups, base.CACHED_ROWS),
            strict=True,
        ):
            x, y = examples.inputs(part), examples.labels(part)
            for number, model in enumerate(singles):
                tally.add(
                    number, self.judging.model.judge_rows(model, x).logits.unsqueeze(0), y, group
                )
        return tally.scores()

    @torch.no_grad()
    def score_pairs(
        self,
        models: Start,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        verdicts: bool = False,
    ) -> PairScores:
        task, examples = self.judging, base.examples_of(self.task, split)
        rows, device = base.split_rows(task, split, time_step), task.world.device
        tally = base.PairTally(len(which), task.world.classes, device, verdicts)
        for pair, (number, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
            model = models.take(number)
            for ids in torch.split(torch.from_numpy(rows.of(owner)).to(device), base.CACHED_ROWS):
                logits = task.model.judge_rows(model, examples.inputs(ids)).logits
                tally.add(torch.full_like(ids, pair), logits, examples.labels(ids), ids)
        return tally.scores()

    def judge(self, models: Start, ids: Tensor) -> Tensor:
        return base.judge(self.judging, models, ids)

    def close(self) -> None:
        pass


def _stack_of_one(
    model: Start, extras: Tree, own: Tree, loss: Tensor
) -> tuple[Start, Tree, Tree, Tensor]:
    def lift(tree: Tree) -> Tree:
        return pytree.map(lambda x: x.unsqueeze(0), tree)

    return (
        Start(lift(model.params), lift(model.buffers)),
        lift(extras),
        lift(own),
        loss.unsqueeze(0),
    )
