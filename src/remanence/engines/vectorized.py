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
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.errors import RunFailed, first_line
from remanence.core.model import Model
from remanence.core.pytree import Tree
from remanence.core.rng import fold_in_batch
from remanence.core.slots import Context, Phase
from remanence.core.types import ModelState, Reply
from remanence.data.batches import Examples
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.compiled_eval import ROWS, compile_for_eval
from remanence.engines.cuda_graphs import GraphedPhase
from remanence.engines.evaluation import predict_logits_stacked
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
from remanence.engines.stack_checks import check_stackable
from remanence.engines.vector_steps import (
    ActiveClients,
    BatchSchedule,
    context_dims,
    round_up,
    run_eagerly,
)
from remanence.kernels.grouped_conv import with_convolutions
from remanence.training.client_step import (
    TrainState,
    accept_or_rollback,
    client_final,
    client_init,
    init_train_state,
)
from remanence.training.gradients import grad_func
from remanence.training.task import ClientIndices, TrainingTask

MAX_STACK = {"cpu": 64, "cuda": 256}  # in one stack, where nobody asks for another size
# rows from which on one network with convolutions fills a GPU by itself (measured with ten CNNs)
GPU_FILL_ROWS = 1_000
CACHE_BYTES = {"cpu": 2**28, "cuda": 2**31}  # bytes of activations of a stack that may be kept
Answer = TypeVar("Answer")
MAX_GRAPHS = 4  # stacks of different form, of which recorded steps are kept


class VectorizedEngine(BaseEngine):
    """`stack` is the most clients trained together, and shrinks where memory does not suffice; the
    result does not depend on it.

    `steps` is how the steps are run: "eager", "captured" (recorded and replayed) or "compiled" (fused,
    too); "auto" takes graphs where there is a GPU.
    """

    name = "vectorized"

    def __init__(self, task: TrainingTask, stack: int = 64, execution: str = "auto"):
        super().__init__()
        check_stackable(task)
        self.task, self.stack = task, stack
        # of all models that look together; fewer where memory does not suffice
        self.score_rows = rows_per_forward(task)
        self.cuda = task.info.device.type == "cuda"
        self.execution = (
            ("captured" if self.cuda else "eager") if execution == "auto" else execution
        )
        self.use_kernels = self.cuda  # are convolutions outside the steps done by our kernels?
        # for good, also where steps turn out not to be: bits depend on it
        self.compiles = self.execution == "compiled"
        self.quick = self._compile_eval()
        self.recordings: list[GraphedPhase] = []  # the one used last stands last
        self.splits: dict[tuple[str, ...], PrefixSplit | None] = {}  # by what is trained
        # else there is nothing to map, and mapping is not free
        self.keeps_slots = bool(task.optimizer.init(task.model.initial.params))

    def train(self, work: ClientWork) -> Iterator[Reply]:
        return (reply for _, reply in self.train_runs([RunWork(self.task, work)]))

    def train_runs(self, works: Sequence[RunWork]) -> Iterator[tuple[int, Reply]]:
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
                    f" {self.task.info.device}{gpu_memory_text(self.task.info.device)}:"
                    " use a smaller local.batch_size or a smaller model, or wait until other"
                    " processes leave more of it free"
                ) from error
        self.stack = count // 2
        self.recordings.clear()
        if self.cuda:
            torch.cuda.empty_cache()
        return None

    def _train_stack(self, portions: Sequence[RunSlice]) -> list[Reply]:
        task, work, device = self.task, portions[0].run.work, self.task.info.device
        (ctx, dims), rows = make_context(portions), rows_of(portions)
        count = len(ctx.client)
        # batch norm writes into buffers even before the first step: every client needs its own
        if dims.start.params is None:
            ctx = ctx._replace(
                start=ModelState(ctx.start.params, pytree.broadcast(ctx.start.buffers, count))
            )
        kept, total, losses = ctx.client_state, np.zeros(count, dtype=np.int64), torch.zeros(())
        model, own, extras = self._client_init(rows, ctx, dims)
        if dims.start.params is not None or task.method.personal(task.info):
            ctx, dims = ctx._replace(start=model), dims._replace(start=context_dims(True).start)
        ctx = ctx._replace(client_state=own)
        for number, phase in enumerate(client_plan.phases_of(task, work)):
            drawn_from, (places, widths) = (
                phase_keys(portions, number),
                plan(portions, number, phase),
            )
            split = self._find_split(phase, rows.train, int(widths.sum()))
            called = rows.train if split is None else flat_indices(rows.train)
            course = _make_schedule(called, places, widths, drawn_from)
            steps, key = client_plan.to_device(
                np.stack([course.steps, drawn_from.view(np.int64)]), device
            ).unbind()
            now, old = ctx._replace(steps=steps, key=key), model
            model, memory, summed = self._train_phase(model, now, dims, number, course, rows, split)
            ctx, losses = ctx._replace(tracker_state=memory), summed / steps
            total += course.steps
            if phase.accept is not None:
                accept = partial(
                    accept_or_rollback,
                    task,
                    grad_func,
                    client_plan.scoped_accept(task, phase),
                )
                model = self._map(accept, (0, 0, 0, dims))(
                    rows, old, model, client_plan.at_hook(now, "accept")
                )
        close: Callable[..., tuple[Tree, Tree]] = partial(client_final, task, grad_func)
        if task.method.hooks(
            "on_client_end"
        ):  # else there is nothing in it to map, and mapping is not free
            close, ctx = (
                self._map(close, (0, 0, 0, 0, dims)),
                client_plan.at_hook(ctx, "after", torch.from_numpy(total).to(device)),
            )
        own, extras = close(rows, model, extras, kept, ctx)
        return make_replies(portions, model, extras, own, losses)

    def _client_init(
        self, rows: ClientIndices, ctx: Context, dims: Context
    ) -> tuple[ModelState, Tree, Tree]:
        """What the clients do before their first step. -> the models they start from, own,
        extras
        """
        start = partial(client_init, self.task, grad_func)
        if self.task.method.hooks("on_client_start"):
            return self._map(start, (0, dims))(rows, client_plan.at_hook(ctx, "before"))
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
            if not self.use_kernels:
                return compute(*arguments)
            try:
                return with_convolutions(compute)(*arguments)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                answer = compute(*arguments)  # fails again where the fault is not ours
                self.use_kernels = False
                self.degraded_reasons.append(
                    f"convolutions are left to torch ({first_line(error)})"
                )
                return answer

        return tried

    def _find_split(self, phase: Phase, rows: Tensor, looks: int) -> PrefixSplit | None:
        """Where the network can be cut in a phase that leaves its front alone; None where nothing
        is gained, or there is no room for what the fronts make of the rows. rows: [k, n], those
        that pad included; looks: rows that all steps see
        """
        trained = tuple(self.task.trained_params(phase))
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
        params = pytree.select_keys(model.params, task.trained_params(task.phases[number]))
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if split is not None:
            task = split.stack_with_cached_features(
                task, model, rows.train, self._rows_at_once(model), self._predict_stacked
            )
            fixed, buffers = split.suffix_params(fixed), split.suffix_params(buffers)
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
            torch.zeros(len(course.ids), dtype=task.info.dtype, device=task.info.device),
            rows,
            ctx,
        )
        progress, loss = self._take_steps(task, number, dims, live, course)
        return (
            ModelState(model.params | progress.params, model.buffers | progress.buffers),
            progress.tracker_state,
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
        if self.execution != "eager":
            # another run's clients may have more rows
            widest = max(min(task.batch_size, task.population.max_client_size), course.ids.shape[2])
            try:
                return self._get_graph(task, number, dims, live, course, widest).run(
                    live, course, task.train
                )
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.recordings.clear()
                self.degraded_reasons.append(f"steps could not be recorded ({first_line(error)})")
                self.execution = "eager"
        # a stack cut from one model shares its memory
        clone = live.state._replace(params=pytree.clone(live.state.params))
        return run_eagerly(task, dims, live._replace(state=clone), course)

    def _get_graph(
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
                task, number, dims, live, course, widest, self.execution == "compiled", behind
            )
        self.recordings = [*(known for known in self.recordings if known is not found), found][
            -MAX_GRAPHS:
        ]
        return found

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        return self.score_groups(
            models, split, evaluation.eval_groups(self.task, split, owners, time_step)
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
        ids, groups, count = evaluation.flatten_groups(rows, self.task.info.device)
        examples = evaluation.examples_of(self.task, split)
        tally = evaluation.ConfusionCounter(
            models.num_models, count, self.task.info.num_classes, ids.device
        )
        for part, some, logits in self._predict_rows(models, examples, ids):
            tally.add(some.start, logits, examples.labels(ids[part]), groups[part])
        return tally.scores()

    @torch.no_grad()
    def _predict_rows(
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
            for first in range(0, models.num_models, together):
                some = slice(first, first + together)
                if alone:
                    yield (
                        part,
                        some,
                        self.quick.predict(models.select(first), x).logits.unsqueeze(0),
                    )
                else:
                    yield part, some, self._predict_stacked(self.task, models.select(some), x, None)

    def _predict_stacked(
        self, task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
    ) -> Tensor:
        return self._by_our_kernels(predict_logits_stacked)(task, models, x, dim)

    def _compile_eval(self) -> Model:
        """The network for many rows of one model; it is compiled where steps are."""
        pieces = min(ROWS[self.task.info.device.type], self.score_rows)
        return compile_for_eval(self.task.model, self.compiles, self.degraded_reasons, pieces)

    def _rows_at_once(self, models: ModelState) -> int:
        """Rows that these models, or as many of them as a stack holds, look at together."""
        most = self.score_rows if self.cuda else evaluation.CPU_ROWS
        return min(most, max(1, self.score_rows // min(models.num_models, self.stack)))

    def _try_scoring(self, score: Callable[[], Answer]) -> Answer:
        """With fewer rows at once where memory does not suffice."""
        while True:
            try:
                return score()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.score_rows == 1:
                    raise
            self.score_rows //= 2
            self.quick = self._compile_eval()
            if self.cuda:
                torch.cuda.empty_cache()

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        rows = evaluation.split_rows(self.task, split, time_step)
        return self.score_on_rows(
            models, which, [rows.for_client(int(owner)) for owner in owners], split, examples
        )

    def score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        examples: bool,
    ) -> PairCounts:
        """Model which[i] of a stack on the examples rows[i]."""
        return self._try_scoring(lambda: self._score_on_rows(models, which, rows, split, examples))

    @torch.no_grad()
    def _score_on_rows(
        self,
        models: ModelState,
        which: np.ndarray,
        rows: Sequence[np.ndarray],
        split: str,
        examples: bool,
    ) -> PairCounts:
        task, data, device = (
            self.task,
            evaluation.examples_of(self.task, split),
            self.task.info.device,
        )
        tally = evaluation.PairCounter(len(which), task.info.num_classes, device, examples)
        sizes = np.array([len(part) for part in rows])
        order = np.argsort(-sizes, kind="stable")  # pairs of one stack have about as many rows
        for first in range(0, len(order), self.stack):
            pairs = order[first : first + self.stack]
            if sizes[pairs[0]] == 0:
                break
            some = models.select(torch.from_numpy(which[pairs]).to(device))
            parts = [rows[pair] for pair in pairs]
            ids, weight = pad_rows(parts, int(parts[0][0]), device, task.info.dtype)
            at_once = self._rows_at_once(some)
            whose = torch.from_numpy(pairs).to(device).unsqueeze(1).expand_as(ids)
            whose = torch.where(weight > 0, whose, len(which))
            for begin_row in range(0, ids.shape[1], at_once):
                window = (slice(None), slice(begin_row, begin_row + at_once))
                logits = self._predict_stacked(task, some, data.inputs(ids[window]), 0)
                tally.add(
                    whose[window].flatten(),
                    logits.flatten(0, 1),
                    data.labels(ids[window].flatten()),
                    ids[window].flatten(),
                )
        return tally.scores()

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return self._try_scoring(lambda: self._predict_logits(models, ids))

    def _predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        logits = torch.empty(0, device=ids.device)
        for part, some, seen in self._predict_rows(models, self.task.train, ids):
            if not len(logits):
                logits = seen.new_empty(models.num_models, len(ids), *seen.shape[2:])
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
    ids = torch.gather(rows, 1, client_plan.to_device(places.reshape(len(places), -1), rows.device))
    step_keys = fold_in_batch(drawn_from[:, None], np.arange(widths.shape[1]))
    return BatchSchedule(ids.reshape(places.shape), widths, step_keys.view(np.int64))
