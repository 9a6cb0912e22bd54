"""The local steps of a phase, captured once and replayed without Python.

On CUDA a captured step is a CUDA graph, of eager or of compiled operations. It reads and writes
fixed memory, the number of the step included, so that nothing is copied to the device between the
first and the last step of a phase. On the CPU it is the flat list of operations that
`kernels/trace.py` traces.

A step is captured for a number of clients and a batch size. Clients are sorted by steps, and the
memory of a smaller stack is the front of that of a larger one: when a stack shrinks, nothing is
copied. Large stacks, and steps that are traced, are captured at few sizes only. A stack of another
size uses the next larger one, and the results of the additional clients are discarded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.contexts import Context
from remanence.core.pytree import Params
from remanence.core.types import Batch
from remanence.data.batches import Examples
from remanence.engines.vector_steps import (
    BatchSchedule,
    StackState,
    StepAll,
    make_batch,
    map_step,
    round_up,
)
from remanence.kernels.capture import capture, clone_tree, copy_tensors, signature
from remanence.kernels.grouped_conv import with_convolutions
from remanence.kernels.torch_internals import foreach_copy_, torch_pytree
from remanence.kernels.trace import TracedFunction
from remanence.training.client_step import TrainState
from remanence.training.task import ClientIndices, TrainingTask

# (state, summed loss, fixed, batch, examples, context): updates the first two in place
UpdateStep = Callable[..., None]

# The sizes of a stack at which steps are captured: all sizes of a small stack, else sizes that
# differ by a factor. Tracing takes seconds for each size, so traced steps always have few.
ALL_SIZES_UP_TO = 16
SIZE_RATIO = 0.8
TRACED_SIZE_RATIO = 0.5
# A shape, such as that of a short last batch, is compiled only if it has at least this share of a
# phase's steps.
MIN_COMPILED_SHARE = 0.2


class StepShape(NamedTuple):
    """What a captured step is made for."""

    clients: int
    batch_size: int
    masked: bool  # whether it may include clients that have no steps left


class CapturedPhase:
    """The captured steps of one phase, and the fixed memory that they read and write.

    It is used again in every round whose stacks fit. What a step is made of:

                    on CUDA                                    on a CPU
        captured    eager operations, in a CUDA graph          traced operations
        compiled    a compiled trace, in a CUDA graph          a compiled trace

    Where a step is traced, it is captured for few sizes of a stack.

    Args:
        task: What is trained.
        phase: The number of the phase.
        dims: Which parts of the context have a client axis.
        active: The first stack that uses it; it determines the size of the memory.
        schedule: Its batches.
        batch: The largest batch size of the experiment.
        compile: Whether steps are compiled before they are captured.
        cached_features: Whether the examples are activations of a frozen prefix. Each round then
            copies its own into the memory of this object.
    """

    def __init__(
        self,
        task: TrainingTask,
        phase: int,
        dims: Context,
        active: StackState,
        schedule: BatchSchedule,
        batch: int,
        compile: bool,
        cached_features: bool,
    ):
        self.task, self.phase, self.dims, self.compile = task, phase, dims, compile
        self.cached_features = cached_features
        self.cuda = task.info.device.type == "cuda"
        self.depends_on_batch = task.model.depends_on_batch
        self.clients, self.batch = len(schedule.ids), batch
        _, self.form = flatten(active, dims)
        self._allocate(active, schedule)
        traced = compile or not self.cuda
        self.sizes = sorted(choose_sizes(self.clients, traced))
        self.mapped = map_step(task, dims)
        self.replays: dict[StepShape, Callable[[], None]] = {}
        self.compiled: set[StepShape] = set()  # those of `replays` that are compiled
        # by number of clients, batch size, and whether it is compiled
        self.traced: dict[tuple[int, int, bool], TracedFunction] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None

    def _allocate(self, active: StackState, schedule: BatchSchedule) -> None:
        """The fixed memory of the stack, its batches, keys and step number."""
        rows = ClientIndices(*(x.new_empty(len(x), round_up(x.shape[1])) for x in active.rows))
        self.active: StackState = torch_pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
            active._replace(rows=rows),
        )
        # by number of clients; see `_first_clients`
        self.views: dict[int, tuple[StackState, list[Tensor]]] = {}
        steps = round_up(schedule.ids.shape[1])
        self.ids = schedule.ids.new_zeros(self.clients, steps, self.batch)
        # what comes from the host, in one copy
        self.host_inputs = schedule.ids.new_zeros(self.clients, 2, steps)
        self.batch_sizes, self.keys = self.host_inputs.unbind(dim=1)
        self.step = torch.zeros((), dtype=torch.int64, device=schedule.ids.device)

    def fits(
        self,
        phase: int,
        dims: Context,
        active: StackState,
        schedule: BatchSchedule,
        batch: int,
        cached_features: bool,
    ) -> bool:
        """Whether this stack fits into the memory and everything else has the same form."""
        clients, steps = schedule.batch_sizes.shape
        enough = (
            clients <= self.clients and round_up(steps) == self.ids.shape[1] and batch == self.batch
        )
        return (
            enough
            and (phase, dims, cached_features) == (self.phase, self.dims, self.cached_features)
            and flatten(active, dims)[1] == self.form
        )

    def run(
        self, active: StackState, schedule: BatchSchedule, examples: Examples
    ) -> tuple[TrainState, Tensor]:
        """Run all steps of a phase. -> state and summed loss of all clients"""
        self._load(active, schedule)
        # copy this round's activations into the memory of the first round's
        if self.cached_features and examples is not self.task.train:
            self.task.train.x[: len(examples.x)] = examples.x
            self.task.train.y[: len(examples.y)] = examples.y
        self.step.zero_()
        shapes = list(self._shapes(schedule))
        # capture all shapes before the first replay: if one fails, the state is unchanged
        for shape, times in Counter(shapes).items():
            compile = self.compile and times >= MIN_COMPILED_SHARE * len(shapes)
            if shape not in self.replays or (compile and shape not in self.compiled):
                self.replays[shape] = self._capture(shape, compile)
                if compile:
                    self.compiled.add(shape)
        for shape in shapes:
            self.replays[shape]()
        after, _ = self._first_clients(len(active.loss))
        return TrainState(*(pytree.clone(part) for part in after.state)), after.loss.clone()

    def _load(self, active: StackState, schedule: BatchSchedule) -> None:
        """Copy a stack and its batches into the fixed memory."""
        clients, steps, batch = schedule.ids.shape
        memory, tensors = self._first_clients(clients)
        foreach_copy_(tensors, flatten(active, self.dims)[0])
        load_rows(memory.rows, active.rows)
        self.ids[:clients, :steps, :batch] = schedule.ids
        if batch < self.batch:
            # the first example of each batch, with weight 0
            self.ids[:clients, :steps, batch:] = schedule.ids[:, :, :1]
        inputs = np.zeros((clients, *self.host_inputs.shape[1:]), dtype=np.int64)
        # clients without steps left compute a full batch, whose result is discarded
        sizes = schedule.batch_sizes
        inputs[:, 0, :steps] = np.where(sizes > 0, sizes, self.batch)
        inputs[:, 1, :steps] = schedule.keys
        self.host_inputs[:clients].copy_(torch.from_numpy(inputs), non_blocking=True)

    def _first_clients(self, count: int) -> tuple[StackState, list[Tensor]]:
        """The memory of the first clients, and its tensors in the order of `flatten`."""
        if count not in self.views:
            view = self.active.cut(slice(0, count), self.dims)
            self.views[count] = view, flatten(view, self.dims)[0]
        return self.views[count]

    def _shapes(self, schedule: BatchSchedule) -> Iterator[StepShape]:
        """The shape of each step; few sizes, even if the number of clients differs by round."""
        for step, count in enumerate(schedule.active_at.tolist()):
            if count == 0:
                return
            size = self.sizes[bisect_left(self.sizes, count)]
            largest = int(schedule.batch_sizes[:count, step].max())
            batch_size = largest if self.depends_on_batch else self.batch
            yield StepShape(size, batch_size, masked=size > count)

    def _capture(self, shape: StepShape, compile: bool) -> Callable[[], None]:
        """A function that runs one step of this shape."""
        update = self._make_update(shape, compile)
        step = partial(self._step, shape, update)
        return capture(partial(self._warmup, shape, update), step, self.pool) if self.cuda else step

    def _make_update(self, shape: StepShape, compile: bool) -> UpdateStep:
        """The step to capture. On CUDA only compiled steps are traced."""
        step_all = with_convolutions(self.mapped, compile) if self.cuda else self.mapped
        if self.cuda and not compile:
            return partial(write_step, step_all, shape.masked)
        form = (shape.clients, shape.batch_size, compile)
        if form not in self.traced:
            self.traced[form] = self._trace(step_all, shape, compile)
        traced = self.traced[form]
        return traced if compile else partial(write_step, traced, shape.masked)

    def _trace(self, step_all: StepAll, shape: StepShape, compile: bool) -> TracedFunction:
        active, step_ctx, batch = self._arguments(shape)
        if not compile:
            example = (active.state, active.fixed, batch, active.rows, step_ctx)
            return TracedFunction(step_all, example)
        # the compiled graph includes the update in place and the masking, which then costs nothing,
        # so that one graph serves masked and unmasked steps
        copies = clone_tree(active.state, active.loss)
        example_update = (*copies, active.fixed, batch, active.rows, step_ctx)
        return TracedFunction(partial(write_step, step_all, True), example_update, compile)

    def _arguments(self, shape: StepShape) -> tuple[StackState, Context, Batch]:
        """Views of the fixed memory for the current step: the stack, its context, its batch."""
        (active, _), at = self._first_clients(shape.clients), self.step.reshape(1)
        key = self.keys[: shape.clients].index_select(1, at).squeeze(1)
        step_ctx = active.ctx._replace(step=self.step, key=key)
        ids = self.ids[: shape.clients, :, : shape.batch_size].index_select(1, at).squeeze(1)
        sizes = self.batch_sizes[: shape.clients].index_select(1, at)
        return active, step_ctx, make_batch(self.task, ids, sizes, step_ctx.key)

    def _step(self, shape: StepShape, update: UpdateStep) -> None:
        """One step, in place."""
        active, step_ctx, batch = self._arguments(shape)
        update(active.state, active.loss, active.fixed, batch, active.rows, step_ctx)
        self.step.add_(1)

    def _warmup(self, shape: StepShape, update: UpdateStep) -> None:
        """The same step on copies."""
        active, step_ctx, batch = self._arguments(shape)
        update(*clone_tree(active.state, active.loss), active.fixed, batch, active.rows, step_ctx)


def write_step(
    step_all: StepAll,
    masked: bool,
    state: TrainState,
    loss: Tensor,
    fixed: Params,
    batch: Batch,
    rows: ClientIndices,
    step_ctx: Context,
) -> None:
    """One step of a stack, which updates its state and its summed loss in place.

    Args:
        step_all: The mapped local step.
        masked: Whether clients that have made all their steps stay as they are.
        state: Of the stack.
        loss: [k], summed over steps.
        fixed: Parameters that are not trained.
        batch: Of this step.
        rows: The clients' examples.
        step_ctx: The context of this step.
    """
    after, step_loss = step_all(state, fixed, batch, rows, step_ctx)
    if signature(after) != signature(state):
        raise TypeError("a local step changes the form of the state it passes to the next step")
    old, new = (
        torch_pytree.tree_leaves((state, loss)),
        torch_pytree.tree_leaves((after, loss + step_loss)),
    )
    if masked:
        # clients of an earlier round may follow in the memory; their results are never read
        has_steps_left = step_ctx.steps > step_ctx.step
        new = [
            torch.where(has_steps_left.reshape(-1, *(1,) * (x.dim() - 1)), x, y)
            for x, y in zip(new, old, strict=True)
        ]
    copy_tensors(old, new)


def choose_sizes(clients: int, traced: bool = False) -> list[int]:
    """The sizes at which a shrinking stack is captured, largest first.

    >>> choose_sizes(3)
    [3, 2, 1]
    >>> choose_sizes(40, traced=True)
    [40, 20, 10, 5, 2, 1]
    """
    if clients <= ALL_SIZES_UP_TO and not traced:
        return list(range(clients, 0, -1))
    sizes, ratio = [clients], TRACED_SIZE_RATIO if traced else SIZE_RATIO
    while sizes[-1] > 1:
        sizes.append(max(1, min(sizes[-1] - 1, int(sizes[-1] * ratio))))
    return sizes


def flatten(active: StackState, dims: Context) -> tuple[list[Tensor], list[Any]]:
    """The tensors of a stack, without its examples, and their form.

    Args:
        active: The stack.
        dims: Which parts of its context have a client axis.

    Returns:
        The tensors; names, shapes without the client axis, and types. Numbers of examples are
        rounded up, so that cohorts of slightly different sizes share a captured step.
    """
    tensors: list[Tensor] = []
    form: list[Any] = [round_up(ids.shape[1]) for ids in (active.rows.train, active.rows.valid)]

    def walk(value: Any, dim: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
            form.append((value.shape if dim is None else value.shape[1:], value.dtype))
        elif isinstance(value, dict):
            form.append(tuple(value))
            for item in value.values():
                walk(item, dim)
        elif isinstance(value, tuple):
            for item, each in zip(
                value, dim if isinstance(dim, tuple) else (dim,) * len(value), strict=True
            ):
                walk(item, each)
        else:
            form.append(value)

    walk(active.ctx, dims)
    walk((active.state, active.fixed, active.loss), 0)
    return tensors, form


def load_rows(memory: ClientIndices, rows: ClientIndices) -> None:
    """Copy examples into memory that may be longer.

    The rest is filled with the first example of each client, with weight 0; that of a client
    without examples is the filler of `run_slices.rows_of`.
    """
    for ids, weight, new_ids, new_weight in ((*memory[:2], *rows[:2]), (*memory[2:], *rows[2:])):
        count = new_ids.shape[1]
        ids[:, :count], weight[:, :count] = new_ids, new_weight
        if count < ids.shape[1]:
            ids[:, count:], weight[:, count:] = rows.train[:, :1], 0
