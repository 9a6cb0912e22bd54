"""The engine `vectorized`: the models of many clients stacked along a leading axis, every local
step of all of them one batched computation.

Clients are sorted by size, so that those with steps left are always the front of the stack: a
client that has made its steps leaves, and nothing is computed for it. A batch is padded only where
batch sizes differ within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence.core import pytree
from remanence.core.contexts import Context
from remanence.core.engine import ClientWork, Result
from remanence.core.errors import RunFailed, first_line
from remanence.core.pytree import Tree
from remanence.core.slots import Phase
from remanence.core.types import ModelState, Reply
from remanence.engines import client_plan, run_slices
from remanence.engines.captured_steps import CapturedPhase
from remanence.engines.frozen_prefix import PrefixSplit, find_split, flat_indices
from remanence.engines.memory import gpu_memory_text, is_out_of_memory
from remanence.engines.run_slices import RunSlice, RunWork
from remanence.engines.stack_checks import check_stackable
from remanence.engines.stack_eval import StackEvaluator
from remanence.engines.vector_steps import (
    BatchSchedule,
    StackState,
    context_dims,
    make_schedule,
    round_up,
    run_eagerly,
    shares_start,
)
from remanence.training.client_step import (
    TrainState,
    accept_or_rollback,
    client_final,
    client_init,
    init_train_state,
)
from remanence.training.gradients import grad_func
from remanence.training.task import ClientIndices, TrainingTask

MAX_STACK = {"cpu": 64, "cuda": 256}  # clients of one stack, unless the user sets another number
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**31}  # of a stack's activations that may be kept
MAX_CAPTURED = 4  # stacks of different form whose captured steps are kept


class VectorizedEngine(StackEvaluator):
    """Trains clients as stacks, of one run or of several.

    Args:
        task: What is trained. Where runs share the engine, the task of the first of them.
        stack: The most clients trained together. It shrinks where memory does not suffice; the
            result does not depend on it.
        execution: "eager", "captured" (steps are captured once and replayed) or "compiled" (steps
            are compiled, then captured). "auto" is "captured" on a GPU, else "eager".
    """

    name = "vectorized"

    def __init__(self, task: TrainingTask, stack: int = MAX_STACK["cpu"], execution: str = "auto"):
        check_stackable(task)
        # evaluation stays compiled if steps fall back to eager, so that its results keep their bits
        super().__init__(task, stack, compiled=execution == "compiled")
        self.execution = (
            ("captured" if self.cuda else "eager") if execution == "auto" else execution
        )
        self.captured: list[CapturedPhase] = []  # the least recently used first
        self.prefix_splits: dict[tuple[str, ...], PrefixSplit | None] = {}  # by what is trained
        # mapping over an empty state takes time, too
        self.has_opt_state = bool(task.optimizer.init(task.model.initial.params))

    def train(self, work: ClientWork) -> Iterator[Reply]:
        return (reply for _, reply in self.train_runs([RunWork(self.task, work)]))

    def train_runs(self, works: Sequence[RunWork]) -> Iterator[tuple[int, Reply]]:
        """Train the clients of several runs of one method as if they belonged to one run.

        Args:
            works: The runs may differ in data, seeds and numeric settings.

        Yields:
            The index of the run, and a reply.
        """
        members, first = run_slices.sort_by_size(works), 0
        while first < len(members):
            some = members[first : first + self.stack]
            replies = self._try_stack(run_slices.split_by_run(works, some))
            if replies is not None:
                first += len(some)
                yield from zip(np.unique(some[:, 0]).tolist(), replies, strict=True)

    def _try_stack(self, slices: Sequence[RunSlice]) -> list[Reply] | None:
        """Train a stack; None where memory does not suffice: stacks are smaller from then on."""
        try:
            return self._train_stack(slices)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if run_slices.count_clients(slices) == 1:
                raise RunFailed(
                    "one client alone does not fit into the memory of"
                    f" {self.task.info.device}{gpu_memory_text(self.task.info.device)}:"
                    " use a smaller local.batch_size or a smaller model, or wait until other"
                    " processes leave more of it free"
                ) from error
        self.stack = run_slices.count_clients(slices) // 2
        self.captured.clear()
        if self.cuda:
            torch.cuda.empty_cache()
        return None

    def _train_stack(self, slices: Sequence[RunSlice]) -> list[Reply]:
        """Train the clients of a stack, from the first hook to their replies."""
        task, work = self.task, slices[0].run.work
        ctx, dims, rows = self._make_context(slices)
        received = ctx.client_state
        model, client_state, payload = self._client_init(rows, ctx, dims)
        # each client starts from a model of its own
        if not shares_start(dims) or task.method.personal(task.info):
            ctx, dims = ctx._replace(start=model), dims._replace(start=context_dims(True).start)
        ctx = ctx._replace(client_state=client_state)
        total, losses = np.zeros(len(ctx.client), dtype=np.int64), torch.zeros(())
        for number, phase in enumerate(client_plan.phases_of(task, work)):
            keys = run_slices.phase_keys(slices, number)
            schedule, split = self._plan_phase(slices, number, phase, rows, keys)
            phase_ctx = self._phase_context(ctx, schedule, keys)
            old = model
            model, tracker_state, summed = self._train_phase(
                model, phase_ctx, dims, number, schedule, rows, split
            )
            ctx, losses = ctx._replace(tracker_state=tracker_state), summed / phase_ctx.steps
            total += schedule.steps
            if phase.accept is not None:
                model = self._accept(phase, rows, old, model, phase_ctx, dims)
        client_state, payload = self._client_final(rows, model, payload, received, ctx, dims, total)
        return run_slices.make_replies(slices, model, payload, client_state, losses)

    def _make_context(self, slices: Sequence[RunSlice]) -> tuple[Context, Context, ClientIndices]:
        """-> the stack's context; `dims`, its `in_dims` for `vmap`; the clients' examples"""
        (ctx, dims), rows = run_slices.make_context(slices), run_slices.rows_of(slices)
        # batch norm writes into buffers even before the first step: every client needs its own
        if shares_start(dims):
            buffers = pytree.broadcast(ctx.start.buffers, len(ctx.client))
            ctx = ctx._replace(start=ModelState(ctx.start.params, buffers))
        return ctx, dims, rows

    def _phase_context(self, ctx: Context, schedule: BatchSchedule, keys: np.ndarray) -> Context:
        """The context of a phase: each client's number of steps and random key."""
        numbers = np.stack([schedule.steps, keys.view(np.int64)])
        steps, key = client_plan.to_device(numbers, self.task.info.device).unbind()
        return ctx._replace(steps=steps, key=key)

    def _client_init(
        self, rows: ClientIndices, ctx: Context, dims: Context
    ) -> tuple[ModelState, Tree, Tree]:
        """Before the first step. -> the models to train, client state, payload"""
        function = partial(client_init, self.task, grad_func)
        if self.task.method.hooks("on_client_start"):
            return self._map_clients(function, (0, dims))(rows, client_plan.at_hook(ctx, "before"))
        if shares_start(dims):
            params = pytree.broadcast(ctx.start.params, len(ctx.client))
            ctx = ctx._replace(start=ModelState(params, ctx.start.buffers))
        # without hooks the function only merges dictionaries, which is right for a stack, too
        return function(rows, ctx)

    def _client_final(
        self,
        rows: ClientIndices,
        model: ModelState,
        payload: Tree,
        received: Tree,
        ctx: Context,
        dims: Context,
        total: np.ndarray,
    ) -> tuple[Tree, Tree]:
        """After the last step. -> client state, payload"""
        function: Callable[..., tuple[Tree, Tree]] = partial(client_final, self.task, grad_func)
        # mapping over nothing takes time, too; a payload is checked client by client
        if payload or self.task.method.hooks("on_client_end"):
            function = self._map_clients(function, (0, 0, 0, 0, dims))
            steps = torch.from_numpy(total).to(self.task.info.device)
            ctx = client_plan.at_hook(ctx, "after", steps)
        return function(rows, model, payload, received, ctx)

    def _accept(
        self,
        phase: Phase,
        rows: ClientIndices,
        old: ModelState,
        new: ModelState,
        ctx: Context,
        dims: Context,
    ) -> ModelState:
        """Each client's model after a phase: the new one where the phase accepts it."""
        accept = client_plan.scoped_accept(self.task, phase)
        function = partial(accept_or_rollback, self.task, grad_func, accept)
        mapped = self._map_clients(function, (0, 0, 0, dims))
        return mapped(rows, old, new, client_plan.at_hook(ctx, "accept"))

    def _map_clients(
        self, function: Callable[..., Result], in_dims: tuple[Any, ...]
    ) -> Callable[..., Result]:
        """A function of one client, such as a hook outside the steps, for a stack of clients."""
        return self.with_kernels(vmap(function, in_dims=in_dims))

    def _plan_phase(
        self,
        slices: Sequence[RunSlice],
        number: int,
        phase: Phase,
        rows: ClientIndices,
        keys: np.ndarray,
    ) -> tuple[BatchSchedule, PrefixSplit | None]:
        """-> the batches of a phase, and its network in two pieces if it has a frozen prefix"""
        positions, batch_sizes = run_slices.plan(slices, number, phase)
        split = self._find_split(phase, rows.train, int(batch_sizes.sum()))
        ids = rows.train if split is None else flat_indices(rows.train)
        return make_schedule(ids, positions, batch_sizes, keys), split

    def _find_split(self, phase: Phase, rows: Tensor, uses: int) -> PrefixSplit | None:
        """Where to cut the network in a phase that does not train its first layers.

        None where it cannot be cut, nothing is gained, or the activations need too much memory.

        Args:
            phase: The phase.
            rows: [k, n] the clients' examples, with padding.
            uses: How many examples all steps of the phase compute.
        """
        trained = tuple(self.task.trained_params(phase))
        if rows.numel() >= uses:
            return None
        if trained not in self.prefix_splits:
            self.prefix_splits[trained] = find_split(self.task, trained)
        split = self.prefix_splits[trained]
        count = len(rows) * round_up(rows.shape[1])
        fits = split is not None and split.width * count <= CACHE_BYTES[rows.device.type]
        return split if fits else None

    def _train_phase(
        self,
        model: ModelState,
        ctx: Context,
        dims: Context,
        number: int,
        schedule: BatchSchedule,
        rows: ClientIndices,
        split: PrefixSplit | None,
    ) -> tuple[ModelState, Tree, Tensor]:
        """-> the trained models, the tracker's state, the summed loss of each client"""
        task, buffers = self.task, model.buffers
        params = pytree.select_keys(model.params, task.trained_params(task.phases[number]))
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if split is not None:
            task = split.stack_with_cached_features(
                task, model, rows.train, self.rows_per_pass(model), self.predict_stacked
            )
            fixed, buffers = split.suffix_params(fixed), split.suffix_params(buffers)
        if task.method.trackers("init"):
            init = vmap(partial(init_train_state, task, grad_func), in_dims=(0, 0, 0, 0, dims))
            state = init(params, fixed, buffers, rows, ctx)
        else:
            opt_state = vmap(task.optimizer.init)(params) if self.has_opt_state else {}
            state = TrainState(params, buffers, opt_state, {})
        loss = torch.zeros(len(schedule.ids), dtype=task.info.dtype, device=task.info.device)
        active = StackState(state, fixed, loss, rows, ctx)
        state, loss = self._run_steps(task, number, dims, active, schedule)
        trained = ModelState(model.params | state.params, model.buffers | state.buffers)
        return trained, state.tracker_state, loss

    def _run_steps(
        self,
        task: TrainingTask,
        number: int,
        dims: Context,
        active: StackState,
        schedule: BatchSchedule,
    ) -> tuple[TrainState, Tensor]:
        """All steps of a phase: captured where requested and possible, else eager.

        After one failure to capture, all later steps are eager, too.
        """
        if self.execution != "eager":
            try:
                found = self._find_captured(task, number, dims, active, schedule)
                return found.run(active, schedule, task.train)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.captured.clear()
                self.degraded_reasons.append(f"steps could not be captured ({first_line(error)})")
                self.execution = "eager"
        # the models of a stack that was broadcast share memory
        state = active.state._replace(params=pytree.clone(active.state.params))
        return run_eagerly(task, dims, active._replace(state=state), schedule)

    def _find_captured(
        self,
        task: TrainingTask,
        number: int,
        dims: Context,
        active: StackState,
        schedule: BatchSchedule,
    ) -> CapturedPhase:
        """Captured steps that fit; else new ones, in place of the least recently used."""
        # the clients of another run may have more examples
        batch = max(task.info.batch_size, schedule.ids.shape[2])
        cached_features = task is not self.task
        found = next(
            (
                each
                for each in self.captured
                if each.fits(number, dims, active, schedule, batch, cached_features)
            ),
            None,
        )
        if found is None:
            compiled = self.execution == "compiled"
            found = CapturedPhase(
                task, number, dims, active, schedule, batch, compiled, cached_features
            )
        others = [each for each in self.captured if each is not found]
        self.captured = [*others, found][-MAX_CAPTURED:]
        return found

    def close(self) -> None:
        self.captured.clear()
