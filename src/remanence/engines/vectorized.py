"""Many clients as one: their models stacked along a leading axis, every step of all of them one
batched computation.

Clients are sorted by size, so that those with steps left are always a prefix of the stack: who is
done leaves it, and nobody computes for the idle. A batch is padded only where widths differ within
a step; an equal short last batch runs as a narrower stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence.core import memory_format, pytree
from remanence.core.errors import InputError, RunFailed, first_line
from remanence.core.model import Model
from remanence.core.pytree import Params, Tree
from remanence.core.rng import Key, fold_in_batch
from remanence.core.types import (
    ClientWork,
    ConfusionCounts,
    Context,
    ModelState,
    PairCounts,
    Phase,
    Reply,
)
from remanence.data.batches import Examples, plan_batches
from remanence.engines import base
from remanence.engines.compiled_eval import ROWS, compile_for_eval
from remanence.engines.cuda_graphs import GraphedPhase
from remanence.engines.frozen_prefix import PrefixSplit, find_split, flat_indices
from remanence.engines.memory import gpu_memory_text, is_out_of_memory, rows_per_forward
from remanence.engines.run_slices import (
    RunSlice,
    RunWork,
    make_context,
    make_replies,
    pad_rows,
    phase_keys,
    plan,
    rows_of,
    sort_by_size,
    split_by_run,
)
from remanence.engines.vector_steps import (
    ActiveClients,
    BatchSchedule,
    context_dims,
    round_up,
    run_eagerly,
)
from remanence.kernels.grouped_conv import with_convolutions
from remanence.training.client_step import (
    ClientIndices,
    TrainingTask,
    TrainState,
    accept_or_rollback,
    client_final,
    client_init,
    grad_func,
    init_train_state,
    predict_logits_stacked,
)

MOST_CLIENTS = {"cpu": 64, "cuda": 256}  # in one stack, where nobody asks for another size
# rows from which on one network with convolutions fills a GPU by itself (measured with ten CNNs)
GPU_FILL_ROWS = 1_000
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**31}  # bytes of activations of a stack that may be kept
Answer = TypeVar("Answer")
MAX_GRAPHS = 4  # stacks of different form, of which recorded steps are kept


class VectorizedEngine:
    """`stack` is the most clients trained together, and shrinks where memory does not suffice; the
    result does not depend on it.

    `steps` is how the steps are run: "eager", "graph" (recorded and replayed) or "compiled" (fused,
    too); "auto" takes graphs where there is a GPU.
    """

    name = "stacked"

    def __init__(self, task: TrainingTask, stack: int = 64, steps: str = "auto"):
        self.task, self.stack = task, stack
        # of all models that look together; fewer where memory does not suffice
        self.score_rows = rows_per_forward(task)
        self.cuda = task.world.device.type == "cuda"
        self.steps = ("graph" if self.cuda else "eager") if steps == "auto" else steps
        # why steps are no longer recorded, or something else is not as fast as it could be
        self.problems: list[str] = []
        self.ours = self.cuda  # are convolutions outside the steps done by our kernels?
        # for good, also where steps turn out not to be: bits depend on it
        self.compiles = self.steps == "compiled"
        self.quick = self._make_quick()
        self.recordings: list[GraphedPhase] = []  # the one used last stands last
        self.splits: dict[tuple[str, ...], PrefixSplit | None] = {}  # by what is trained
        # else there is nothing to map, and mapping is not free
        self.keeps_slots = bool(task.optimizer.init(task.model.initial.params))
        reject_padded_batch_norm(task)
        reject_unvectorizable(task)

    @property
    def fallback(self) -> str:
        return "; ".join(self.problems)

    def train(self, job: ClientWork) -> Iterator[Reply]:
        return (reply for _, reply in self.train_together([RunWork(self.task, job)]))

    def train_together(self, works: Sequence[RunWork]) -> Iterator[tuple[int, Reply]]:
        """Jobs of several runs of one method, as if they were one; the runs' tasks may differ
        in data, seeds and numbers. -> which work, reply
        """
        members, first = sort_by_size(works), 0
        while first < len(members):
            some = members[first : first + self.stack]
            replies = self._try_stack(split_by_run(works, some))
            if replies is not None:
                first += len(some)
                yield from zip(np.unique(some[:, 0]).tolist(), replies, strict=True)

    def _try_stack(self, portions: Sequence[RunSlice]) -> list[Reply] | None:
        """None where memory did not suffice: the stack is then smaller for good."""
        count = sum(len(portion.places) for portion in portions)
        try:
            return self._train_stack(portions)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if count == 1:
                raise RunFailed(
                    "one client alone does not fit into the memory of"
                    f" {self.task.world.device}{gpu_memory_text(self.task.world.device)}:"
                    " use a smaller local.batch or a smaller model, or wait until other"
                    " processes leave more of it free"
                ) from error
        self.stack = count // 2
        self.recordings.clear()
        if self.cuda:
            torch.cuda.empty_cache()
        return None

    def _train_stack(self, portions: Sequence[RunSlice]) -> list[Reply]:
        task, job, device = self.task, portions[0].work.job, self.task.world.device
        (ctx, dims), rows = make_context(portions), rows_of(portions)
        count = len(ctx.client)
        # batch norm writes into buffers even before the first step: every client needs its own
        if dims.start.params is None:
            ctx = ctx._replace(
                start=ModelState(ctx.start.params, pytree.broadcast(ctx.start.buffers, count))
            )
        kept, total, losses = ctx.own, np.zeros(count, dtype=np.int64), torch.zeros(())
        model, own, extras = self._begin(rows, ctx, dims)
        if dims.start.params is not None or task.method.personal(task.world):
            ctx, dims = ctx._replace(start=model), dims._replace(start=context_dims(True).start)
        ctx = ctx._replace(own=own)
        for number, phase in enumerate(base.phases_of(task, job)):
            drawn_from, (places, widths) = (
                phase_keys(portions, number),
                plan(portions, number, phase),
            )
            split = self._find_split(phase, rows.train, int(widths.sum()))
            called = rows.train if split is None else flat_indices(rows.train)
            course = _make_schedule(called, places, widths, drawn_from)
            steps, key = base.to_device(
                np.stack([course.steps, drawn_from.view(np.int64)]), device
            ).unbind()
            now, old = ctx._replace(steps=steps, key=key), model
            model, memory, summed = self._train_phase(model, now, dims, number, course, rows, split)
            ctx, losses = ctx._replace(memory=memory), summed / steps
            total += course.steps
            if phase.accept is not None:
                accept = partial(
                    accept_or_rollback,
                    task,
                    grad_func,
                    base.scoped_accept(task, phase),
                )
                model = self._map(accept, (0, 0, 0, dims))(
                    rows, old, model, base.at_hook(now, "accept")
                )
        close: Callable[..., tuple[Tree, Tree]] = partial(client_final, task, grad_func)
        if task.method.many("after"):  # else there is nothing in it to map, and mapping is not free
            close, ctx = (
                self._map(close, (0, 0, 0, 0, dims)),
                base.at_hook(ctx, "after", torch.from_numpy(total).to(device)),
            )
        own, extras = close(rows, model, extras, kept, ctx)
        return make_replies(portions, model, extras, own, losses)

    def _begin(
        self, rows: ClientIndices, ctx: Context, dims: Context
    ) -> tuple[ModelState, Tree, Tree]:
        """What the clients do before their first step. -> the models they start from, own,
        extras
        """
        start = partial(client_init, self.task, grad_func)
        if self.task.method.many("before"):
            return self._map(start, (0, dims))(rows, base.at_hook(ctx, "before"))
        if dims.start.params is None:
            ctx = ctx._replace(
                start=ModelState(
                    pytree.broadcast(ctx.start.params, len(ctx.client)), ctx.start.buffers
                )
            )
        return start(rows, ctx)

    def _map(
        self, function: Callable[..., Answer], in_dims: tuple[Any, ...]
    ) -> Callable[..., Answer]:
        """What one client does outside its steps, for a stack of them."""
        return self._by_our_kernels(vmap(function, in_dims=in_dims))

    def _by_our_kernels(self, compute: Callable[..., Answer]) -> Callable[..., Answer]:
        """The same where they can do it. They may fail in ways of their own (no compiler, a second
        derivative), and nothing is lost by another try: all that comes here is a function of its
        arguments.
        """

        def tried(*arguments: Any) -> Answer:
            if not self.ours:
                return compute(*arguments)
            try:
                return with_convolutions(compute)(*arguments)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                answer = compute(*arguments)  # fails again where the fault is not ours
                self.ours = False
                self.problems.append(f"convolutions are left to torch ({first_line(error)})")
                return answer

        return tried

    def _find_split(self, phase: Phase, rows: Tensor, looks: int) -> PrefixSplit | None:
        """Where the network can be cut in a phase that leaves its front alone; None where nothing
        is gained, or there is no room for what the fronts make of the rows. rows: [k, n], those
        that pad included; looks: rows that all steps see
        """
        trained = tuple(self.task.trained_names(phase))
        if rows.numel() >= looks:
            return None
        if trained not in self.splits:
            self.splits[trained] = find_split(self.task, trained)
        split = self.splits[trained]
        room = len(rows) * round_up(rows.shape[1])
        return (
            split
            if split is not None and split.width * room <= CACHE_BYTES[rows.device.type]
            else None
        )

    def _train_phase(
        self,
        model: ModelState,
        ctx: Context,
        dims: Context,
        number: int,
        course: BatchSchedule,
        rows: ClientIndices,
        split: PrefixSplit | None,
    ) -> tuple[ModelState, Tree, Tensor]:
        """-> the trained models, what was tracked, the summed loss of each client"""
        task, buffers = self.task, model.buffers
        params = pytree.select_keys(model.params, task.trained_names(task.phases[number]))
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if split is not None:
            task = split.stack_behind(
                task, model, rows.train, self._rows_at_once(model), self._judge_together
            )
            fixed, buffers = split.rear_of(fixed), split.rear_of(buffers)
        if task.method.trackers("init"):
            start_all = vmap(partial(init_train_state, task, grad_func), in_dims=(0, 0, 0, 0, dims))
            first = start_all(params, fixed, buffers, rows, ctx)
        else:
            first = TrainState(
                params, buffers, vmap(task.optimizer.init)(params) if self.keeps_slots else {}, {}
            )
        live = ActiveClients(
            first,
            fixed,
            torch.zeros(len(course.ids), dtype=task.world.dtype, device=task.world.device),
            rows,
            ctx,
        )
        progress, loss = self._take_steps(task, number, dims, live, course)
        return (
            ModelState(model.params | progress.params, model.buffers | progress.buffers),
            progress.memory,
            loss,
        )

    def _take_steps(
        self,
        task: TrainingTask,
        number: int,
        dims: Context,
        live: ActiveClients,
        course: BatchSchedule,
    ) -> tuple[TrainState, Tensor]:
        """Recorded where that is asked for and possible, else plainly; once it proved
        impossible, plainly for good.
        """
        if self.steps != "eager":
            # another run's clients may have more rows
            widest = max(min(task.batch, task.population.capacity), course.ids.shape[2])
            try:
                return self._find_recording(task, number, dims, live, course, widest).run(
                    live, course, task.train
                )
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.recordings.clear()
                self.problems.append(f"steps could not be recorded ({first_line(error)})")
                self.steps = "eager"
        # a stack cut from one model shares its memory
        clone = live.progress._replace(params=pytree.clone(live.progress.params))
        return run_eagerly(task, dims, live._replace(progress=clone), course)

    def _find_recording(
        self,
        task: TrainingTask,
        number: int,
        dims: Context,
        live: ActiveClients,
        course: BatchSchedule,
        widest: int,
    ) -> GraphedPhase:
        """The one that fits, or a new one in place of that which was not used for longest."""
        behind = task is not self.task
        found = next(
            (
                known
                for known in self.recordings
                if known.fits(number, dims, live, course, widest, behind)
            ),
            None,
        )
        if found is None:
            found = GraphedPhase(
                task, number, dims, live, course, widest, self.steps == "compiled", behind
            )
        self.recordings = [*(known for known in self.recordings if known is not found), found][
            -MAX_GRAPHS:
        ]
        return found

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        return self.score_groups(
            models, split, base.eval_groups(self.task, split, owners, time_step)
        )

    def score_groups(
        self, models: ModelState, split: str, rows: Sequence[np.ndarray]
    ) -> ConfusionCounts:
        """Every model of a stack on every group of examples."""
        return self._try_scoring(lambda: self._score_groups(models, split, rows))

    @torch.no_grad()
    def _score_groups(
        self, models: ModelState, split: str, rows: Sequence[np.ndarray]
    ) -> ConfusionCounts:
        ids, groups, count = base.pad_groups(rows, self.task.world.device)
        examples = base.examples_of(self.task, split)
        tally = base.ConfusionCounter(models.many, count, self.task.world.classes, ids.device)
        for part, some, logits in self._look_at(models, examples, ids):
            tally.add(some.start, logits, examples.labels(ids[part]), groups[part])
        return tally.scores()

    @torch.no_grad()
    def _look_at(
        self, models: ModelState, examples: Examples, ids: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """All models on the same rows, some at a time. ids: [n] -> which rows, which models,
        their logits [m, n, C]
        """
        alone = self.cuda and self.task.model.has_convolutions and len(ids) >= GPU_FILL_ROWS
        at_once, together = (
            (self.score_rows, 1) if alone else (self._rows_at_once(models), self.stack)
        )
        for first_row in range(0, len(ids) or 1, at_once):
            part = slice(first_row, first_row + at_once)
            x = (
                memory_format.to_channels_last(examples.inputs(ids[part]))
                if alone
                else examples.inputs(ids[part])
            )
            for first in range(0, models.many, together):
                some = slice(first, first + together)
                if alone:
                    yield (
                        part,
                        some,
                        self.quick.judge_rows(models.take(first), x).logits.unsqueeze(0),
                    )
                else:
                    yield part, some, self._judge_together(self.task, models.take(some), x, None)

    def _judge_together(
        self, task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
    ) -> Tensor:
        return self._by_our_kernels(predict_logits_stacked)(task, models, x, dim)

    def _make_quick(self) -> Model:
        """The network for many rows of one model; it is compiled where steps are."""
        pieces = min(ROWS[self.task.world.device.type], self.score_rows)
        return compile_for_eval(self.task.model, self.compiles, self.problems, pieces)

    def _rows_at_once(self, models: ModelState) -> int:
        """Rows that these models, or as many of them as a stack holds, look at together."""
        most = self.score_rows if self.cuda else base.CACHED_ROWS
        return min(most, max(1, self.score_rows // min(models.many, self.stack)))

    def _try_scoring(self, score: Callable[[], Answer]) -> Answer:
        """With fewer rows at once where memory does not suffice."""
        while True:
            try:
                return score()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.score_rows == 1:
                    raise
            self.score_rows //= 2
            self.quick = self._make_quick()
            if self.cuda:
                torch.cuda.empty_cache()

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        verdicts: bool = False,
    ) -> PairCounts:
        rows = base.split_rows(self.task, split, time_step)
        return self.score_on_rows(
            models, which, [rows.of(int(owner)) for owner in owners], split, verdicts
        )

    def score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        verdicts: bool,
    ) -> PairCounts:
        """Model which[i] of a stack on the examples rows[i]."""
        return self._try_scoring(lambda: self._score_on_rows(models, which, rows, split, verdicts))

    @torch.no_grad()
    def _score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        verdicts: bool,
    ) -> PairCounts:
        task, examples, device = (
            self.task,
            base.examples_of(self.task, split),
            self.task.world.device,
        )
        tally = base.PairCounter(len(which), task.world.classes, device, verdicts)
        sizes = np.array([len(part) for part in rows])
        order = np.argsort(-sizes, kind="stable")  # pairs of one stack have about as many rows
        for first in range(0, len(order), self.stack):
            pairs = order[first : first + self.stack]
            if sizes[pairs[0]] == 0:
                break
            some = models.take(torch.from_numpy(which[pairs]).to(device))
            parts = [rows[pair] for pair in pairs]
            ids, weight = pad_rows(parts, int(parts[0][0]), device, task.world.dtype)
            at_once = self._rows_at_once(some)
            whose = torch.from_numpy(pairs).to(device).unsqueeze(1).expand_as(ids)
            whose = torch.where(weight > 0, whose, len(which))
            for begin_row in range(0, ids.shape[1], at_once):
                window = (slice(None), slice(begin_row, begin_row + at_once))
                logits = self._judge_together(task, some, examples.inputs(ids[window]), 0)
                tally.add(
                    whose[window].flatten(),
                    logits.flatten(0, 1),
                    examples.labels(ids[window].flatten()),
                    ids[window].flatten(),
                )
        return tally.scores()

    def judge(self, models: ModelState, ids: Tensor) -> Tensor:
        return self._try_scoring(lambda: self._judge(models, ids))

    def _judge(self, models: ModelState, ids: Tensor) -> Tensor:
        logits = torch.empty(0, device=ids.device)
        for part, some, seen in self._look_at(models, self.task.train, ids):
            if not len(logits):
                logits = seen.new_empty(models.many, len(ids), *seen.shape[2:])
            logits[some, part] = seen
        return logits

    def close(self) -> None:
        self.recordings.clear()


def _make_schedule(
    rows: Tensor, places: np.ndarray, widths: np.ndarray, drawn_from: np.ndarray
) -> BatchSchedule:
    """The planned batches of a phase as numbers of examples on the device.

    rows: [k, n]; places: [k, steps, batch] among them; widths: [k, steps]; drawn_from: the clients'
        keys in this phase
    """
    ids = torch.gather(rows, 1, base.to_device(places.reshape(len(places), -1), rows.device))
    step_keys = fold_in_batch(drawn_from[:, None], np.arange(widths.shape[1]))
    return BatchSchedule(ids.reshape(places.shape), widths, step_keys.view(np.int64))


def needs_padding(task: TrainingTask) -> bool:
    """Do two clients ever have batches of different width at the same step?"""
    for holdings in task.population.steps:
        for phase in task.phases:
            seen: dict[int, int] = {}
            for size in np.unique(holdings.train.sizes):
                widths = plan_batches(
                    Key(0), int(size), task.batch, phase.epochs, phase.steps, task.drop_last
                ).widths
                if any(
                    seen.setdefault(step, int(width)) != width for step, width in enumerate(widths)
                ):
                    return True
    return False


def reject_padded_batch_norm(task: TrainingTask) -> None:
    """Padded rows would enter the statistics of batch norm."""
    if task.model.depends_on_batch and needs_padding(task):
        raise InputError(
            "engine stacked cannot train this model with batch norm: the clients' sizes"
            " differ, and rows that pad a batch would enter its statistics;"
            " use engine=loop, clients of equal size, local.drop_last=true, or a model"
            " with group norm"
        )


def reject_unvectorizable(task: TrainingTask) -> None:
    """Some layers cannot be mapped over a stack: better found on two rows than in the middle of
    a run.
    """
    two = ModelState(*(pytree.broadcast(tree, 2) for tree in task.model.initial))
    x = task.train.inputs(torch.zeros(2, 2, dtype=torch.int64, device=task.world.device))
    key = torch.zeros(2, dtype=torch.int64, device=task.world.device)

    def loss(params: Params, buffers: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        out, new = task.model.apply(params, buffers, x, key)
        return out.logits.sum(), new

    try:
        vmap(torch.func.grad(loss, has_aux=True))(*two, x, key)
    except RuntimeError as error:
        raise InputError(
            "engine stacked cannot run this model, because torch cannot map it over a"
            f" stack ({first_line(error)}): use engine=loop"
        ) from error
