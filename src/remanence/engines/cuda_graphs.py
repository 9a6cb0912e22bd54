"""A phase of local steps from fixed places in memory, so that a step can be recorded once and
replayed without Python.

On CUDA a recorded step is a CUDA graph, of the plain operations or of compiled ones; nothing
crosses to the device between the first and the last step of a phase, the number of the step
included. On the CPU it is the flat list of operations that `kernels/trace.py` writes down.

A recording is made for a number of clients and a width. Clients stand sorted by steps, and the
memory of a smaller stack is the front of that of a larger one, so clients that are done are simply
left behind: nothing is copied when a stack shrinks. Where there would be too many sizes, a few are
recorded, and the clients between one size and the next are computed and thrown away.
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

from remanence.core import pytree as trees
from remanence.core.pytree import Params
from remanence.core.slots import Context
from remanence.core.types import Batch
from remanence.data.batches import Examples
from remanence.engines.vector_steps import (
    ActiveClients,
    BatchSchedule,
    StepAll,
    make_batch,
    map_step,
    round_up,
)
from remanence.kernels.capture import capture, clone_tree, copy_tensors, signature
from remanence.kernels.grouped_conv import with_convolutions
from remanence.kernels.torch_internals import foreach_copy_
from remanence.kernels.torch_internals import torch_pytree as pytree
from remanence.kernels.trace import trace_step
from remanence.training.client_step import TrainState
from remanence.training.task import ClientIndices, TrainingTask

# (progress, summed loss, fixed, batch, rows, context): a step that is written to where the first
# two lie
Advance = Callable[..., None]

SIZES = 16  # stacks up to this size are recorded at every size they shrink to
RATIO = 0.8  # larger ones at sizes that differ by this factor
# fewer sizes where each one is written down, and perhaps compiled, which takes seconds
RATIO_TRACED = 0.5
# of a phase's steps: those of a form that is rarer, such as a short last batch, are not worth
# compiling
OFTEN = 0.2


class GraphShape(NamedTuple):
    """What a recording is made for."""

    clients: int
    batch_size: int
    masked: bool  # may the last ones of these clients be done already?


class GraphedPhase:
    """The steps of one phase, with memory for so many clients; used round after round."""

    def __init__(
        self,
        task: TrainingTask,
        phase: int,
        dims: Context,
        live: ActiveClients,
        course: BatchSchedule,
        width: int,
        compile: bool,
        behind: bool,
    ):
        self.task, self.phase, self.dims, self.compile = task, phase, dims, compile
        # are its examples what fronts made of a round's rows? They are then its own, and others in
        # every round
        self.behind = behind
        self.cuda, self.depends_on_batch = (
            task.info.device.type == "cuda",
            task.model.depends_on_batch,
        )
        self.clients, self.batch = len(course.ids), width
        _, self.form = flatten(live, dims)
        roomy = ClientIndices(*(x.new_empty(len(x), round_up(x.shape[1])) for x in live.rows))
        self.live: ActiveClients = pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
            live._replace(rows=roomy),
        )
        self.fronts: dict[
            int, tuple[ActiveClients, list[Tensor]]
        ] = {}  # by number of clients; see _front
        self.sizes = sorted(
            choose_sizes(self.clients, RATIO if self.cuda and not compile else RATIO_TRACED)
        )
        self.ids = course.ids.new_zeros(self.clients, round_up(course.ids.shape[1]), width)
        # what comes from the host in one copy
        self.told = course.ids.new_zeros(self.clients, 2, self.ids.shape[1])
        self.widths, self.keys = self.told.unbind(dim=1)
        self.step = torch.zeros((), dtype=torch.int64, device=course.ids.device)
        self.mapped = map_step(task, dims)
        self.replays: dict[GraphShape, Callable[[], None]] = {}
        self.fused: set[GraphShape] = set()  # those of them that are compiled
        # by clients, width, and whether it is compiled
        self.written: dict[tuple[int, int, bool], Any] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None

    def fits(
        self,
        phase: int,
        dims: Context,
        live: ActiveClients,
        course: BatchSchedule,
        width: int,
        behind: bool,
    ) -> bool:
        """Is there room for this stack, with everything else of the same form? `width` is the
        batch of the whole experiment.
        """
        clients, steps = course.batch_sizes.shape
        room = (
            clients <= self.clients and round_up(steps) == self.ids.shape[1] and width == self.batch
        )
        return (
            room
            and (phase, dims, behind) == (self.phase, self.dims, self.behind)
            and flatten(live, dims)[1] == self.form
        )

    def run(
        self, live: ActiveClients, course: BatchSchedule, examples: Examples
    ) -> tuple[TrainState, Tensor]:
        """-> progress and summed loss of all clients"""
        self._load(live, course)
        # what fronts made of this round's rows: into the memory of the first round's
        if self.behind and examples is not self.task.train:
            self.task.train.x[: len(examples.x)], self.task.train.y[: len(examples.y)] = (
                examples.x,
                examples.y,
            )
        self.step.zero_()
        shapes = list(self._shapes(course))
        # before the first replay: should one fail, nothing has changed
        for shape, times in Counter(shapes).items():
            fuse = self.compile and times >= OFTEN * len(shapes)
            if shape not in self.replays or (fuse and shape not in self.fused):
                self.replays[shape] = self._capture(shape, fuse)
                if fuse:
                    self.fused.add(shape)
        for shape in shapes:
            self.replays[shape]()
        after, _ = self._prefix_view(len(live.loss))
        return TrainState(*(trees.clone(part) for part in after.state)), after.loss.clone()

    def _load(self, live: ActiveClients, course: BatchSchedule) -> None:
        clients, steps, batch = course.ids.shape
        memory, tensors = self._prefix_view(clients)
        foreach_copy_(tensors, flatten(live, self.dims)[0])
        load_rows(memory.rows, live.rows)
        self.ids[:clients, :steps, :batch] = course.ids
        if batch < self.batch:
            self.ids[:clients, :steps, batch:] = course.ids[:, :, :1]  # a row of the client itself
        told = np.zeros((clients, *self.told.shape[1:]), dtype=np.int64)
        # who is done still computes something finite
        told[:, 0, :steps] = np.where(course.batch_sizes > 0, course.batch_sizes, self.batch)
        told[:, 1, :steps] = course.keys
        self.told[:clients].copy_(torch.from_numpy(told), non_blocking=True)

    def _prefix_view(self, count: int) -> tuple[ActiveClients, list[Tensor]]:
        """The memory of the first clients, and its tensors in the order in which they are
        loaded.
        """
        if count not in self.fronts:
            front = self.live.cut(slice(0, count), self.dims)
            self.fronts[count] = front, flatten(front, self.dims)[0]
        return self.fronts[count]

    def _shapes(self, course: BatchSchedule) -> Iterator[GraphShape]:
        """One for each step of the phase; of few sizes, also where the number of clients
        changes from round to round.
        """
        for step, count in enumerate(course.active_at.tolist()):
            if count == 0:
                return
            size = self.sizes[bisect_left(self.sizes, count)]
            width = (
                int(course.batch_sizes[:count, step].max()) if self.depends_on_batch else self.batch
            )
            yield GraphShape(size, width, masked=size > count)

    def _capture(self, shape: GraphShape, fuse: bool) -> Callable[[], None]:
        advance = self._traced_step(shape, fuse)
        take = partial(self._step, shape, advance)
        return (
            capture(partial(self._warmup, shape, advance), take, self.pool) if self.cuda else take
        )

    def _traced_step(self, shape: GraphShape, fuse: bool) -> Advance:
        """The step as it will be recorded: for CUDA only what is compiled is written down
        before.
        """
        step_all = with_convolutions(self.mapped, fuse) if self.cuda else self.mapped
        if self.cuda and not fuse:
            return partial(write_step, step_all, shape.masked)
        form = (shape.clients, shape.batch_size, fuse)
        if form not in self.written:
            live, now, batch = self._arguments(shape)
            # writing back is part of it, and so is masking, which then costs nothing: both kinds
            # share one
            if fuse:
                example = (*clone_tree(live.state, live.loss), live.fixed, batch, live.rows, now)
                self.written[form] = trace_step(partial(write_step, step_all, True), example, True)
            else:
                self.written[form] = trace_step(
                    step_all, (live.state, live.fixed, batch, live.rows, now), False
                )
        return self.written[form] if fuse else partial(write_step, self.written[form], shape.masked)

    def _arguments(self, shape: GraphShape) -> tuple[ActiveClients, Context, Any]:
        (live, _), at = self._prefix_view(shape.clients), self.step.reshape(1)
        now = live.ctx._replace(
            step=self.step, key=self.keys[: shape.clients].index_select(1, at).squeeze(1)
        )
        ids = self.ids[: shape.clients, :, : shape.batch_size].index_select(1, at).squeeze(1)
        return (
            live,
            now,
            make_batch(self.task, ids, self.widths[: shape.clients].index_select(1, at), now.key),
        )

    def _step(self, shape: GraphShape, advance: Advance) -> None:
        """One step, written back in place."""
        live, now, batch = self._arguments(shape)
        advance(live.state, live.loss, live.fixed, batch, live.rows, now)
        self.step.add_(1)

    def _warmup(self, shape: GraphShape, advance: Advance) -> None:
        """The same, and nothing is changed by it."""
        live, now, batch = self._arguments(shape)
        advance(*clone_tree(live.state, live.loss), live.fixed, batch, live.rows, now)


def write_step(
    step_all: StepAll,
    masked: bool,
    progress: TrainState,
    loss: Tensor,
    fixed: Params,
    batch: Batch,
    rows: ClientIndices,
    now: Context,
) -> None:
    """One step of a stack, written to where its progress and its summed loss lie; where
    `masked`, not for clients that are done.
    """
    after, more = step_all(progress, fixed, batch, rows, now)
    if signature(after) != signature(progress):
        raise TypeError("a local step changes the form of what it hands to the next")
    old, new = pytree.tree_leaves((progress, loss)), pytree.tree_leaves((after, loss + more))
    if masked:
        # behind the clients of this round may stand those of an earlier one, which nobody reads
        here = now.steps > now.step
        new = [
            torch.where(here.reshape(-1, *(1,) * (x.dim() - 1)), x, y)
            for x, y in zip(new, old, strict=True)
        ]
    copy_tensors(old, new)


def choose_sizes(clients: int, ratio: float = RATIO) -> list[int]:
    """The sizes at which a shrinking stack is recorded, largest first.

    >>> choose_sizes(3)
    [3, 2, 1]
    >>> choose_sizes(40, ratio=0.5)
    [40, 20, 10, 5, 2, 1]
    """
    if clients <= SIZES and ratio >= RATIO:
        return list(range(clients, 0, -1))
    sizes = [clients]
    while sizes[-1] > 1:
        sizes.append(max(1, min(sizes[-1] - 1, int(sizes[-1] * ratio))))
    return sizes


def flatten(live: ActiveClients, dims: Context) -> tuple[list[Tensor], list[Any]]:
    """-> the tensors of a stack but for its rows, and their form: names, shapes without the
    clients' axis, types

    Lengths of rows are rounded up, so that cohorts of somewhat different sizes share a recording.
    """
    tensors: list[Tensor] = []
    form: list[Any] = [round_up(ids.shape[1]) for ids in (live.rows.train, live.rows.valid)]

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

    walk(live.ctx, dims)
    walk((live.state, live.fixed, live.loss), 0)
    return tensors, form


def load_rows(memory: ClientIndices, rows: ClientIndices) -> None:
    """Into memory that may be longer: it is filled up with a row of the client itself, which
    weighs nothing.
    """
    for ids, weight, some, their_weight in ((*memory[:2], *rows[:2]), (*memory[2:], *rows[2:])):
        count = some.shape[1]
        ids[:, :count], weight[:, :count] = some, their_weight
        if count < ids.shape[1]:
            ids[:, count:], weight[:, count:] = rows.train[:, :1], 0
