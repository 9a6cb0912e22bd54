"""Many clients as one: their models stacked along a leading axis, every step of all of them one batched computation.

Clients are sorted by size, so that those with steps left are always a prefix of the stack: who is done leaves it, and nobody computes for the idle. A batch
is padded only where widths differ within a step; an equal short last batch runs as a narrower stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from remanence import trees
from remanence.data.batches import plan_batches
from remanence.engines import common
from remanence.engines.graphs import Recording, fit_into_room
from remanence.engines.steps import Course, Live, context_dims, run_eagerly
from remanence.errors import InputError, RunFailed
from remanence.keys import Key
from remanence.local import Progress, SplitRows, Task, begin, differentiate_functional, finish, first_progress, keep_or_revert
from remanence.trees import Params, Tree
from remanence.types import Context, Job, PairScores, Phase, Reply, Scores, Start

SCORE_ROWS = 500
PAIR_ROWS = 20_000  # rows of all pairs of a stack that are looked at at once
RECORDINGS = 4  # stacks of different form, of which recorded steps are kept


class Stacked:
    """`stack` is the most clients trained together, and shrinks where memory does not suffice; the result does not depend on it.

    `steps` is how the steps are run: "eager", "graph" (recorded and replayed) or "compiled" (fused, too); "auto" takes graphs where there is a GPU.
    """

    name = "stacked"

    def __init__(self, task: Task, stack: int = 64, steps: str = "auto"):
        self.task, self.stack = task, stack
        self.steps = ("graph" if task.world.device.type == "cuda" else "eager") if steps == "auto" else steps
        self.fallback = ""  # why steps are no longer recorded
        self.recordings: list[Recording] = []  # the one used last stands last
        refuse_padded_batch_norm(task)
        refuse_unstackable(task)

    def train(self, job: Job) -> Iterator[Reply]:
        sizes = self.task.population.at(job.time_step).train.sizes[job.clients]
        order, first = np.argsort(-sizes, kind="stable"), 0
        while first < len(order):
            places = order[first : first + self.stack]
            reply = self._try_stack(job, places)
            if reply is not None:
                first += len(places)
                yield reply

    def _try_stack(self, job: Job, places: np.ndarray) -> Reply | None:
        """None where memory did not suffice: the stack is then smaller for good."""
        try:
            return self._train_stack(job, places)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(places) == 1:
                raise RunFailed(
                    f"one client alone does not fit into the memory of {self.task.world.device}: use a smaller local.batch or a smaller model"
                ) from error
        self.stack = len(places) // 2
        self.recordings.clear()
        if self.task.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _train_stack(self, job: Job, places: np.ndarray) -> Reply:
        """places: positions in the cohort, largest client first"""
        task, clients, device = self.task, job.clients[places], self.task.world.device
        ctx, rows = common.make_context(task, job, torch.from_numpy(places)), self._rows(job, clients)
        if not job.personal_start:  # batch norm writes into buffers even before the first step: every client needs its own
            ctx = ctx._replace(start=Start(ctx.start.params, trees.expand(ctx.start.buffers, len(clients))))
        dims = context_dims(job.personal_start)
        kept, total, losses = ctx.own, np.zeros(len(clients), dtype=np.int64), torch.zeros(())
        model, own, extras = self._begin(rows, common.at(ctx, "before"), dims)
        if job.personal_start or task.method.personal(task.world):
            ctx, dims = ctx._replace(start=model), context_dims(True)
        ctx = ctx._replace(own=own)
        for number, phase in enumerate(common.phases_of(task, job)):
            course = self._plan(job, clients, number, phase, rows)
            steps = torch.from_numpy(course.steps).to(device)
            now, old = common.enter_phase(ctx, number, steps), model
            model, memory, summed = self._train_phase(model, now, dims, number, course, rows)
            ctx, losses = ctx._replace(memory=memory), summed / steps
            total += course.steps
            if phase.accept is not None:
                accept = partial(keep_or_revert, task, differentiate_functional, common.scoped_accept(task, phase))
                model = vmap(accept, in_dims=(0, 0, 0, dims))(rows, old, model, common.at(now, "accept"))
        end = common.at(ctx, "after", torch.from_numpy(total).to(device))
        close: Callable[..., tuple[Tree, Tree]] = partial(finish, task, differentiate_functional)
        if task.method.many("after"):  # else there is nothing in it to map, and mapping is not free
            close = vmap(close, in_dims=(0, 0, 0, 0, dims))
        own, extras = close(rows, model, extras, kept, end)
        return common.make_reply(task, job, clients, model, extras, own, losses)

    def _begin(self, rows: SplitRows, ctx: Context, dims: Context) -> tuple[Start, Tree, Tree]:
        """What the clients do before their first step. -> the models they start from, own, extras"""
        start = partial(begin, self.task, differentiate_functional)
        if self.task.method.many("before"):
            return vmap(start, in_dims=(0, dims))(rows, ctx)
        if dims.start.params is None:
            ctx = ctx._replace(start=Start(trees.expand(ctx.start.params, len(ctx.client)), ctx.start.buffers))
        return start(rows, ctx)

    def _plan(self, job: Job, clients: np.ndarray, number: int, phase: Phase, rows: SplitRows) -> Course:
        """The batches of all clients in one phase, as numbers of examples on the device."""
        places, widths = common.plan_phases(self.task, job, clients, number, phase)  # [k, steps, batch], [k, steps]
        flat = torch.from_numpy(places).to(rows.train.device).reshape(len(clients), -1)
        return Course(torch.gather(rows.train, 1, flat).reshape(places.shape), widths)

    def _train_phase(
        self, model: Start, ctx: Context, dims: Context, number: int, course: Course, rows: SplitRows
    ) -> tuple[Start, Tree, Tensor]:
        """-> the trained models, what was tracked, the summed loss of each client"""
        task = self.task
        params = trees.restrict(model.params, task.trained_names(task.phases[number]))
        fixed = {name: value for name, value in model.params.items() if name not in params}
        if task.method.trackers("init"):
            start_all = vmap(partial(first_progress, task, differentiate_functional), in_dims=(0, 0, 0, 0, dims))
            first = start_all(params, fixed, model.buffers, rows, ctx)
        else:
            first = Progress(params, model.buffers, vmap(task.optimiser.init)(params), {})
        live = Live(first, fixed, torch.zeros(len(course.ids), dtype=task.world.dtype, device=task.world.device), rows, ctx)
        progress, loss = self._take_steps(number, dims, live, course)
        whole = {**fixed, **progress.params}
        return Start({name: whole[name] for name in model.params}, progress.buffers), progress.memory, loss

    def _take_steps(self, number: int, dims: Context, live: Live, course: Course) -> tuple[Progress, Tensor]:
        """Recorded where that is asked for and possible, else plainly; once it proved impossible, plainly for good."""
        if self.steps != "eager":
            rows, wide = fit_into_room(live.rows, course, min(self.task.batch, self.task.population.capacity))
            roomy = live._replace(rows=rows)
            try:
                return self._find_recording(number, dims, roomy, wide).run(roomy, wide)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.recordings.clear()
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                self.fallback, self.steps = f"steps could not be recorded ({reason})", "eager"
        clone = live.progress._replace(params=trees.clone(live.progress.params))  # a stack cut from one model shares its memory
        return run_eagerly(self.task, dims, live._replace(progress=clone), course)

    def _find_recording(self, number: int, dims: Context, live: Live, course: Course) -> Recording:
        """The one that fits, or a new one in place of that which was not used for longest."""
        found = next((known for known in self.recordings if known.fits(number, dims, live, course)), None)
        if found is None:
            found = Recording(self.task, number, dims, live, course, compile=self.steps == "compiled")
        self.recordings = [*(known for known in self.recordings if known is not found), found][-RECORDINGS:]
        return found

    def _rows(self, job: Job, clients: np.ndarray) -> SplitRows:
        holdings = self.task.population.at(job.time_step)
        train, train_weight = self._pad_rows([holdings.train.of(int(client)) for client in clients], holdings.train.of(int(clients[0]))[0])
        valid, valid_weight = self._pad_rows([holdings.valid.of(int(client)) for client in clients], holdings.train.of(int(clients[0]))[0])
        return SplitRows(train, train_weight, valid, valid_weight)

    def _pad_rows(self, parts: list[np.ndarray], filler: int) -> tuple[Tensor, Tensor]:
        """-> ids [k, longest], weight [k, longest]"""
        sizes = np.array([len(part) for part in parts])
        ids = np.full((len(parts), sizes.max()), filler, dtype=np.int64)
        for row, part in zip(ids, parts, strict=True):
            row[: len(part)] = part
        weight = np.arange(ids.shape[1]) < sizes[:, None]
        return torch.from_numpy(ids).to(self.task.world.device), torch.from_numpy(weight).to(self.task.world.device, self.task.world.dtype)

    @torch.no_grad()
    def score(self, models: Start, split: str, owners: np.ndarray | None = None, time_step: int = 0) -> Scores:
        ids, groups, count = common.rows_to_score(self.task, split, owners, time_step)
        examples = common.examples_of(self.task, split)
        many = len(next(iter(models.params.values())))
        tally = common.Tally(many, count, self.task.world.classes, ids.device)
        for part, group in zip(torch.split(ids, SCORE_ROWS), torch.split(groups, SCORE_ROWS), strict=True):
            x, y = examples.inputs(part), examples.labels(part)
            for first in range(0, many, self.stack):
                some = models.take(slice(first, first + self.stack))
                logits = vmap(lambda model, x=x: self.task.model.judge_rows(model, x).logits)(some)  # [m, n, C]
                for number, of_model in enumerate(logits):
                    tally.add(first + number, of_model, y, group)
        return tally.scores()

    @torch.no_grad()
    def score_pairs(
        self, models: Start, which: np.ndarray, owners: np.ndarray, split: str, time_step: int = 0, verdicts: bool = False
    ) -> PairScores:
        task, examples, rows = self.task, common.examples_of(self.task, split), common.split_rows(self.task, split, time_step)
        tally = common.PairTally(len(which), task.world.classes, task.world.device, verdicts)
        order = np.argsort(-rows.sizes[owners], kind="stable")  # pairs of one stack have about as many rows
        for first in range(0, len(order), self.stack):
            pairs = order[first : first + self.stack]
            if rows.sizes[owners[pairs[0]]] == 0:
                break
            some = models.take(torch.from_numpy(which[pairs]).to(task.world.device))
            parts = [rows.of(int(owner)) for owner in owners[pairs]]
            ids, weight = self._pad_rows(parts, int(parts[0][0]))
            at_once = max(1, PAIR_ROWS // len(pairs))
            pair = torch.from_numpy(pairs).to(task.world.device).unsqueeze(1).expand_as(ids)
            for begin_row in range(0, ids.shape[1], at_once):
                window = (slice(None), slice(begin_row, begin_row + at_once))
                logits = vmap(lambda model, x: task.model.judge_rows(model, x).logits)(some, examples.inputs(ids[window]))
                real = weight[window] > 0
                tally.add(pair[window][real], logits[real], examples.labels(ids[window][real]), ids[window][real])
        return tally.scores()

    def close(self) -> None:
        self.recordings.clear()


def needs_padding(task: Task) -> bool:
    """Do two clients ever have batches of different width at the same step?"""
    for holdings in task.population.steps:
        for phase in task.phases:
            seen: dict[int, int] = {}
            for size in np.unique(holdings.train.sizes):
                widths = plan_batches(Key(0), int(size), task.batch, phase.epochs, phase.steps, task.drop_last).widths
                if any(seen.setdefault(step, int(width)) != width for step, width in enumerate(widths)):
                    return True
    return False


def is_out_of_memory(error: Exception) -> bool:
    """Of the device or, in the words of torch's allocator, of the host."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def refuse_padded_batch_norm(task: Task) -> None:
    """Padded rows would enter the statistics of batch norm."""
    if task.model.mixes_rows and needs_padding(task):
        raise InputError(
            "engine stacked cannot train this model with batch norm: the clients' sizes differ, and rows that pad a batch would enter its statistics;"
            " use engine=loop, clients of equal size, local.drop_last=true, or a model with group norm"
        )


def refuse_unstackable(task: Task) -> None:
    """Some layers cannot be mapped over a stack: better found on two rows than in the middle of a run."""
    two = Start(*(trees.expand(tree, 2) for tree in task.model.initial))
    x = task.train.inputs(torch.zeros(2, 2, dtype=torch.int64, device=task.world.device))
    key = torch.zeros(2, dtype=torch.int64, device=task.world.device)

    def loss(params: Params, buffers: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        out, new = task.model.apply(params, buffers, x, key)
        return out.logits.sum(), new

    try:
        vmap(torch.func.grad(loss, has_aux=True))(*two, x, key)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"engine stacked cannot run this model, because torch cannot map it over a stack ({reason}): use engine=loop"
        ) from error
