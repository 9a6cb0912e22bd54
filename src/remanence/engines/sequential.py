"""One client after the other in this process, by plain autograd: the oracle every other engine
must equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from remanence.core import memory_format, pytree, rng
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Context, Phase
from remanence.core.types import Batch, ModelState, Reply
from remanence.data.batches import BatchPlan
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.training.client_step import (
    TrainState,
    accept_or_rollback,
    client_final,
    client_init,
    init_train_state,
    train_step,
)
from remanence.training.gradients import grad_autograd
from remanence.training.task import ClientIndices, TrainingTask

FETCHED = 2**22  # bytes of the batches that are fetched together


class SequentialEngine(BaseEngine):
    """`channels_last` lays images out as convolutions on a CPU like them; it changes no result
    beyond rounding.
    """

    name = "sequential"

    def __init__(self, task: TrainingTask, channels_last: bool = False):
        super().__init__()
        self.task, self.channels_last = task, channels_last
        self.eval_task = task  # the same, for looking at rows without training

    def train(self, work: ClientWork) -> Iterator[Reply]:
        for place in range(len(work.clients)):
            yield self.train_client(work, place)

    def train_client(self, work: ClientWork, place: int) -> Reply:
        """The whole round of the client at this place of the cohort, as a stack of one."""
        task, client = self.task, int(work.clients[place])
        ctx, rows = client_plan.make_context(task, work, place), self._rows(work, client)
        kept, total, losses = ctx.client_state, 0, torch.zeros(())
        model, own, extras = client_init(
            task, grad_autograd, rows, client_plan.at_hook(ctx, "before")
        )
        ctx = ctx._replace(client_state=own, start=model)
        for number, phase in enumerate(client_plan.phases_of(task, work)):
            plan, old = client_plan.plan_phase(task, work, client, number, phase), model
            now = client_plan.at_phase(ctx, number, len(plan.batch_sizes))
            model, memory, losses = self._train_phase(model, now, phase, plan, rows)
            ctx = ctx._replace(tracker_state=memory)
            total += len(plan.batch_sizes)
            if phase.accept is not None:
                accept = client_plan.scoped_accept(task, phase)
                model = accept_or_rollback(
                    self.eval_task,
                    grad_autograd,
                    accept,
                    rows,
                    old,
                    model,
                    client_plan.at_hook(now, "accept"),
                )
        own, extras = client_final(
            task, grad_autograd, rows, model, extras, kept, client_plan.at_hook(ctx, "after", total)
        )
        return client_plan.make_reply(
            task, work, np.array([client]), *_stack_of_one(model, extras, own, losses.mean())
        )

    def _train_phase(
        self, model: ModelState, ctx: Context, phase: Phase, plan: BatchPlan, rows: ClientIndices
    ) -> tuple[ModelState, Tree, Tensor]:
        """-> the trained model, what was tracked, the loss of every step"""
        task, names = self.task, self.task.trained_params(phase)
        params = pytree.select_keys(model.params, names)
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if self.channels_last:
            params, fixed = (
                {name: memory_format.to_channels_last(value) for name, value in tree.items()}
                for tree in (params, fixed)
            )
        first = init_train_state(task, grad_autograd, params, fixed, model.buffers, rows, ctx)
        ids = rows.train[torch.from_numpy(plan.indices).to(rows.train.device)]  # [steps, batch]
        progress, losses = self.take_steps(task, first, fixed, ctx, rows, ids, plan.batch_sizes)
        whole = {**fixed, **progress.params}
        trained = ModelState(
            {name: whole[name].contiguous() for name in model.params}, progress.buffers
        )
        return trained, progress.tracker_state, torch.stack(losses)

    def take_steps(
        self,
        task: TrainingTask,
        progress: TrainState,
        fixed: Params,
        ctx: Context,
        rows: ClientIndices,
        ids: Tensor,
        widths: np.ndarray,
    ) -> tuple[TrainState, list[Tensor]]:
        """ids: [steps, batch]; widths: [steps], how many of them count -> progress, the loss of
        every step
        """
        losses = []
        for batch, number, key in self.iter_batches(task, ctx, ids, widths):
            progress, loss = train_step(
                task,
                grad_autograd,
                progress,
                fixed,
                batch,
                rows,
                ctx._replace(step=number, key=key),
            )
            losses.append(loss)
        return progress, losses

    def iter_batches(
        self, task: TrainingTask, ctx: Context, ids: Tensor, widths: np.ndarray
    ) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """The batch, the number and the key of every step; the rows of some steps are fetched
        together, which is faster.
        """
        numbers = torch.arange(len(ids), device=ids.device)
        step_keys, ones = (
            rng.fold_in(ctx.key, numbers),
            torch.ones(ids.shape[1], dtype=task.info.dtype, device=ids.device),
        )
        together = max(1, FETCHED // (ids.shape[1] * task.train.x[0].numel() * ones.element_size()))
        for first in range(0, len(ids), together):
            some = slice(first, first + together)
            # [steps * batch, ...]
            rows = self.to_channels_last(
                task.train.augmented(ids[some], step_keys[some]).flatten(0, 1)
            )
            x, y = rows.reshape(*ids[some].shape, *rows.shape[1:]), task.train.labels(ids[some])
            for place, width in enumerate(widths[some].tolist()):
                batch = Batch(
                    x[place, :width], y[place, :width], ones[:width], ids[first + place, :width]
                )
                yield batch, numbers[first + place], step_keys[first + place]

    def to_channels_last(self, x: Tensor) -> Tensor:
        return memory_format.to_channels_last(x) if self.channels_last else x

    def _rows(self, work: ClientWork, client: int) -> ClientIndices:
        holdings, device, dtype = (
            self.task.population.at(work.time_step),
            self.task.info.device,
            self.task.info.dtype,
        )
        train, valid = (
            torch.from_numpy(rows.for_client(client)).to(device)
            for rows in (holdings.train, holdings.valid)
        )
        return ClientIndices(
            train,
            torch.ones(len(train), dtype=dtype, device=device),
            valid,
            torch.ones(len(valid), dtype=dtype, device=device),
        )

    @torch.no_grad()
    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        return self.score_rows(
            models, split, *evaluation.eval_rows(self.task, split, owners, time_step)
        )

    @torch.no_grad()
    def score_rows(
        self, models: ModelState, split: str, ids: Tensor, groups: Tensor, count: int
    ) -> ConfusionCounts:
        """Score on given rows of a split; groups: [n] below count."""
        examples = evaluation.examples_of(self.task, split)
        many = models.num_models
        tally = evaluation.ConfusionCounter(many, count, self.task.info.num_classes, ids.device)
        singles = [models.select(number) for number in range(many)]
        for part, group in zip(
            torch.split(ids, evaluation.CPU_ROWS),
            torch.split(groups, evaluation.CPU_ROWS),
            strict=True,
        ):
            x, y = examples.inputs(part), examples.labels(part)
            for number, model in enumerate(singles):
                tally.add(
                    number, self.eval_task.model.predict(model, x).logits.unsqueeze(0), y, group
                )
        return tally.scores()

    @torch.no_grad()
    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        task, data = self.eval_task, evaluation.examples_of(self.task, split)
        rows, device = evaluation.split_rows(task, split, time_step), task.info.device
        tally = evaluation.PairCounter(len(which), task.info.num_classes, device, examples)
        for pair, (number, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
            model = models.select(number)
            for ids in torch.split(
                torch.from_numpy(rows.for_client(owner)).to(device), evaluation.CPU_ROWS
            ):
                logits = task.model.predict(model, data.inputs(ids)).logits
                tally.add(torch.full_like(ids, pair), logits, data.labels(ids), ids)
        return tally.scores()

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return evaluation.predict_logits(self.eval_task, models, ids)


def _stack_of_one(
    model: ModelState, extras: Tree, own: Tree, loss: Tensor
) -> tuple[ModelState, Tree, Tree, Tensor]:
    def lift(tree: Tree) -> Tree:
        return pytree.map(lambda x: x.unsqueeze(0), tree)

    return (
        ModelState(lift(model.params), lift(model.buffers)),
        lift(extras),
        lift(own),
        loss.unsqueeze(0),
    )
