"""The engine `sequential`: one client after the other in this process, by plain autograd.

It is the reference: every other engine must give the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import memory_format, pytree, rng
from remanence.core.contexts import Context
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Phase
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

GATHER_BYTES = 2**22  # of the batches that are gathered together

BatchStep = tuple[Batch, Tensor, Tensor]  # a step's batch, number and random key


class PhaseInputs(NamedTuple):
    """What the steps of one client in one phase read."""

    task: TrainingTask
    state: TrainState  # before the first step
    fixed: Params  # parameters that the phase does not train
    ctx: Context  # of the phase
    rows: ClientIndices
    ids: Tensor  # [steps, batch] examples; shorter batches are padded
    batch_sizes: np.ndarray  # [steps] examples that count


class SequentialEngine(BaseEngine):
    """Trains one client after the other, by plain autograd.

    Args:
        task: What is trained.
        channels_last: Use images channels-last, which is faster for convolutions on a CPU. It
            changes no result beyond rounding.
    """

    name = "sequential"

    def __init__(self, task: TrainingTask, channels_last: bool = False):
        super().__init__()
        self.task, self.channels_last = task, channels_last
        self.eval_task = task  # the same task, for evaluation

    def train(self, work: ClientWork) -> Iterator[Reply]:
        for index in range(len(work.clients)):
            yield self.train_client(work, index)

    def train_client(self, work: ClientWork, index: int) -> Reply:
        """Train one client of the cohort. -> a reply of one client"""
        task, client = self.task, int(work.clients[index])
        ctx, rows = client_plan.make_context(task, work, index), self._rows(work, client)
        received, total, losses = ctx.client_state, 0, torch.zeros(())
        model, client_state, payload = client_init(
            task, grad_autograd, rows, client_plan.at_hook(ctx, "before")
        )
        ctx = ctx._replace(client_state=client_state, start=model)
        for number, phase in enumerate(client_plan.phases_of(task, work)):
            plan, old = client_plan.plan_phase(task, work, client, number, phase), model
            phase_ctx = client_plan.at_phase(ctx, number, len(plan.batch_sizes))
            model, tracker_state, losses = self._train_phase(model, phase_ctx, phase, plan, rows)
            ctx = ctx._replace(tracker_state=tracker_state)
            total += len(plan.batch_sizes)
            if phase.accept is not None:
                accept = client_plan.scoped_accept(task, phase)
                accept_ctx = client_plan.at_hook(phase_ctx, "accept")
                model = accept_or_rollback(
                    self.eval_task, grad_autograd, accept, rows, old, model, accept_ctx
                )
        ctx = client_plan.at_hook(ctx, "after", total)
        client_state, payload = client_final(
            task, grad_autograd, rows, model, payload, received, ctx
        )
        stacked = _stack_of_one(model, payload, client_state, losses.mean())
        return client_plan.make_reply(task, work, np.array([client]), *stacked)

    def _train_phase(
        self, model: ModelState, ctx: Context, phase: Phase, plan: BatchPlan, rows: ClientIndices
    ) -> tuple[ModelState, Tree, Tensor]:
        """-> the trained model, the tracker's state, the loss of every step"""
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
        state, losses = self.run_steps(
            PhaseInputs(task, first, fixed, ctx, rows, ids, plan.batch_sizes)
        )
        whole = {**fixed, **state.params}
        trained = ModelState(
            {name: whole[name].contiguous() for name in model.params}, state.buffers
        )
        return trained, state.tracker_state, torch.stack(losses)

    def run_steps(self, inputs: PhaseInputs) -> tuple[TrainState, list[Tensor]]:
        """All steps of a phase. -> the state after the last step, the loss of every step"""
        task, state, fixed, ctx, rows, ids, batch_sizes = inputs
        losses = []
        for batch, number, key in self.iter_batches(task, ctx, ids, batch_sizes):
            step_ctx = ctx._replace(step=number, key=key)
            state, loss = train_step(task, grad_autograd, state, fixed, batch, rows, step_ctx)
            losses.append(loss)
        return state, losses

    def iter_batches(
        self, task: TrainingTask, ctx: Context, ids: Tensor, batch_sizes: np.ndarray
    ) -> Iterator[BatchStep]:
        """The batch, number and key of every step.

        The examples of several steps are gathered together, which is faster.
        """
        numbers = torch.arange(len(ids), device=ids.device)
        step_keys = rng.fold_in(ctx.key, numbers)
        ones = torch.ones(ids.shape[1], dtype=task.info.dtype, device=ids.device)
        batch_bytes = ids.shape[1] * task.train.x[0].numel() * ones.element_size()
        count = max(1, GATHER_BYTES // batch_bytes)
        for first in range(0, len(ids), count):
            some = slice(first, first + count)
            # [steps * batch, ...]
            flat = self.to_channels_last(
                task.train.augmented(ids[some], step_keys[some]).flatten(0, 1)
            )
            x, y = flat.reshape(*ids[some].shape, *flat.shape[1:]), task.train.labels(ids[some])
            for place, size in enumerate(batch_sizes[some].tolist()):
                batch = Batch(
                    x[place, :size], y[place, :size], ones[:size], ids[first + place, :size]
                )
                yield batch, numbers[first + place], step_keys[first + place]

    def to_channels_last(self, x: Tensor) -> Tensor:
        return memory_format.to_channels_last(x) if self.channels_last else x

    def _rows(self, work: ClientWork, client: int) -> ClientIndices:
        data, info = self.task.population.at(work.time_step), self.task.info
        train, valid = (
            torch.from_numpy(rows.for_client(client)).to(info.device)
            for rows in (data.train, data.valid)
        )
        return ClientIndices(
            train,
            torch.ones(len(train), dtype=info.dtype, device=info.device),
            valid,
            torch.ones(len(valid), dtype=info.dtype, device=info.device),
        )

    @torch.no_grad()
    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        rows = evaluation.eval_rows(self.task, split, owners, time_step)
        return self.score_rows(models, split, *rows)

    @torch.no_grad()
    def score_rows(
        self, models: ModelState, split: str, ids: Tensor, groups: Tensor, count: int
    ) -> ConfusionCounts:
        """Evaluate models on given examples.

        Args:
            models: Stacked [m, ...].
            split: The split of the examples.
            ids: [n]
            groups: [n] the group of each example.
            count: The number of groups.
        """
        examples = evaluation.examples_of(self.task, split)
        counter = evaluation.ConfusionCounter(
            models.num_models, count, self.task.info.num_classes, ids.device
        )
        singles = [models.select(number) for number in range(models.num_models)]
        for part, group in zip(
            torch.split(ids, evaluation.CPU_ROWS),
            torch.split(groups, evaluation.CPU_ROWS),
            strict=True,
        ):
            x, y = examples.inputs(part), examples.labels(part)
            for number, model in enumerate(singles):
                logits = self.eval_task.model.predict(model, x).logits.unsqueeze(0)
                counter.add(number, logits, y, group)
        return counter.scores()

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
        counter = evaluation.PairCounter(len(which), task.info.num_classes, device, examples)
        for pair, (number, owner) in enumerate(zip(which.tolist(), owners.tolist(), strict=True)):
            model = models.select(number)
            owned = torch.from_numpy(rows.for_client(owner)).to(device)
            for ids in torch.split(owned, evaluation.CPU_ROWS):
                logits = task.model.predict(model, data.inputs(ids)).logits
                counter.add(torch.full_like(ids, pair), logits, data.labels(ids), ids)
        return counter.scores()

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return evaluation.predict_logits(self.eval_task, models, ids)


def _stack_of_one(
    model: ModelState, payload: Tree, client_state: Tree, loss: Tensor
) -> tuple[ModelState, Tree, Tree, Tensor]:
    def lift(tree: Tree) -> Tree:
        return pytree.map(lambda x: x.unsqueeze(0), tree)

    return (
        ModelState(lift(model.params), lift(model.buffers)),
        lift(payload),
        lift(client_state),
        loss.unsqueeze(0),
    )
