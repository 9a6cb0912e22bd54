"""What every engine does the same way: plans, keys, the shape of a reply, counting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence.core import pytree, rng
from remanence.core.compose import BoundHook
from remanence.core.engine import ClientWork, ConfusionCounts, ExampleResults, PairCounts
from remanence.core.pytree import Tree
from remanence.core.slots import Accept, Context, Phase
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.data.batches import BatchPlan, Examples, count_steps, plan_batches, plan_batches_many
from remanence.data.population import PartitionIndices
from remanence.training.task import TrainingTask


def make_context(task: TrainingTask, job: ClientWork, place: int | Tensor) -> Context:
    """The context of one client of the cohort (an integer) or of a stack of them (a tensor of
    places).
    """
    device = task.info.device
    clients = job.clients[place if isinstance(place, int) else place.numpy()]
    values = client_keys(job, np.atleast_1d(clients)).view(np.int64).reshape(clients.shape)
    client, key = to_device(np.stack([clients, values]), device).unbind()
    there = place if isinstance(place, int) else to_device(place.numpy(), device)
    return Context(
        client=client,
        round=torch.full((), job.round, dtype=torch.int64, device=device),
        start=job.start.select(place) if job.per_client_start else job.start,
        broadcast=job.broadcast,
        client_state=pytree.take(job.client_state, there),
        tracker_state={},
        stats=ClientStats(*(fact[there] for fact in job.stats)),
        step=torch.zeros((), dtype=torch.int64, device=device),
        steps=torch.zeros_like(client),
        hyper=task.hparam_tensors(),
        optimizer_hparams=task.tensors(job.optimizer_hparams),
        key=key,
        info=task.info,
    )


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting: the copy takes its turn behind what the device has still to do, and the
    host goes on.
    """
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def at_hook(ctx: Context, moment: str, steps: int | Tensor | None = None) -> Context:
    """The context at a moment outside the steps, with randomness of its own."""
    return ctx._replace(
        steps=ctx.steps if steps is None else torch.zeros_like(ctx.steps) + steps,
        key=rng.fold_in(ctx.key, moment),
    )


def at_phase(ctx: Context, number: int, steps: int | Tensor) -> Context:
    """The context of a phase: its number of steps, and randomness of its own."""
    return ctx._replace(
        steps=torch.zeros_like(ctx.steps) + steps,
        key=rng.fold_in(rng.fold_in(ctx.key, "phase"), number),
    )


def client_keys(job: ClientWork, clients: np.ndarray) -> np.ndarray:
    """Each client's randomness in a round. -> uint64 [k]"""
    return rng.fold_in_batch(job.key.fold_in("client"), clients)


def phase_keys(values: np.ndarray, number: int) -> np.ndarray:
    """What `at_phase` makes of the clients' keys. uint64 [k] -> uint64 [k]"""
    return rng.fold_in_batch(values, "phase", number)


def plan_phase(
    task: TrainingTask, job: ClientWork, client: int, number: int, phase: Phase
) -> BatchPlan:
    """The batches of one client in one phase: a function of keys and of how many rows it has,
    nothing else.
    """
    count = len(task.population.at(job.time_step).train.for_client(client))
    key = job.key.fold_in("client", client, "plan", number)
    return plan_batches(key, count, task.batch_size, phase.epochs, phase.steps, task.drop_last)


def plan_phases(
    task: TrainingTask,
    job: ClientWork,
    clients: np.ndarray,
    values: np.ndarray,
    number: int,
    phase: Phase,
) -> tuple[np.ndarray, np.ndarray]:
    """The plans of many clients, by their keys, as one: rows [k, steps, batch] and widths [k,
    steps], which are 0 where a client is done.
    """
    counts = task.population.at(job.time_step).train.sizes[clients]
    return plan_batches_many(
        rng.fold_in_batch(values, "plan", number),
        counts,
        task.batch_size,
        phase.epochs,
        phase.steps,
        task.drop_last,
    )


def expected_steps(task: TrainingTask, job: ClientWork) -> np.ndarray:
    """Local steps of each client of the cohort over all phases. -> [k]"""
    sizes = task.population.at(job.time_step).train.sizes[job.clients]
    return np.array(
        [
            sum(
                count_steps(int(n), task.batch_size, p.epochs, p.steps, task.drop_last)
                for p in phases_of(task, job)
            )
            for n in sizes
        ]
    )


def phases_of(task: TrainingTask, job: ClientWork) -> tuple[Phase, ...]:
    """The phases a job asks for."""
    return task.phases[: job.num_phases or None]


def scoped_accept(task: TrainingTask, phase: Phase) -> Accept:
    """A phase's `accept`, seeing the subtree of the part that brought the phases."""
    owner = task.method.part_filling("phases")
    assert phase.accept is not None
    return phase.accept if owner is None else BoundHook(owner, phase.accept)


def make_reply(
    task: TrainingTask,
    job: ClientWork,
    clients: np.ndarray,
    model: ModelState,
    extras: Tree,
    own: Tree,
    loss: Tensor,
) -> Reply:
    """What k clients send back; all trees stacked."""
    sizes, device = task.population.at(job.time_step).train.sizes[clients], task.info.device
    return Reply(
        client=to_device(clients.astype(np.int64), device),
        round=torch.full((len(clients),), job.round, dtype=torch.int64, device=device),
        params=pytree.select_keys(model.params, task.communicated_params()),
        buffers=pytree.select_keys(model.buffers, task.communicated_buffers()),
        payload=extras,
        weight=to_device(sizes.astype(np.float64), device),
        client_state=own,
        loss=loss,
    )


def examples_of(task: TrainingTask, split: str) -> Examples:
    return task.test if split == "test" else task.train


def eval_groups(
    task: TrainingTask, split: str, owners: np.ndarray | None, time_step: int
) -> list[np.ndarray]:
    """The ids of every group of rows that a score counts apart."""
    if split == "test":
        return list(task.population.test_ids)
    if split == "public":
        return [task.public.numpy()]
    rows = split_rows(task, split, time_step)
    return [rows.ids] if owners is None else [rows.for_client(int(owner)) for owner in owners]


def eval_rows(
    task: TrainingTask, split: str, owners: np.ndarray | None, time_step: int
) -> tuple[Tensor, Tensor, int]:
    """-> ids [n], group of each row [n], number of groups"""
    return pad_groups(eval_groups(task, split, owners, time_step), task.info.device)


def pad_groups(groups: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """-> ids [n], group of each row [n], number of groups"""
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return (
        torch.from_numpy(np.concatenate(groups)).to(device),
        torch.from_numpy(numbers).to(device),
        len(groups),
    )


def split_rows(task: TrainingTask, split: str, time_step: int) -> PartitionIndices:
    """The rows of every client, or on the test split of every concept."""
    if split == "test":
        return PartitionIndices.concat(task.population.test_ids)
    holdings = task.population.at(time_step)
    return holdings.train if split == "train" else holdings.valid


# rows a model sees at once on a CPU when it is scored: larger chunks fall out of the cache
CACHED_ROWS = 500
# most counters that are filled at once: with many groups and classes, models are counted in turn
CELLS = 20_000_000


@torch.no_grad()
def predict_logits(task: TrainingTask, models: ModelState, ids: Tensor) -> Tensor:
    """Stacked models on these training rows. ids: [n] -> logits [m, n, C]"""
    return torch.cat(
        [
            predict_logits_stacked(task, models, task.train.inputs(part), None)
            for part in torch.split(ids, CACHED_ROWS)
        ],
        dim=1,
    )


def predict_logits_stacked(
    task: TrainingTask, models: ModelState, x: Tensor, dim: int | None
) -> Tensor:
    """Logits [m, n, C] of m stacked models, on the same inputs (dim None) or each on its own
    (dim 0).

    The models run one by one where stacking gains nothing: with a single model, and for
    convolutions on a CPU, where grouped ones take three times as long.
    """
    predict, count = task.model.predict, models.num_models
    if count == 1 or (task.info.device.type == "cpu" and task.model.has_convolutions):
        return torch.stack(
            [
                predict(models.select(number), x if dim is None else x[number]).logits
                for number in range(count)
            ]
        )
    logits: Tensor = torch.func.vmap(
        lambda model, inputs: predict(model, inputs).logits, in_dims=(0, dim)
    )(models, x)
    return logits


class ConfusionCounter:
    """Counts what models predict, group by group."""

    def __init__(self, models: int, groups: int, classes: int, device: torch.device):
        self.groups, self.classes = groups, classes
        self.confusion = torch.zeros(
            models, groups * classes * classes, dtype=torch.int64, device=device
        )
        self.loss = torch.zeros(models, groups, dtype=torch.float64, device=device)

    def add(self, first: int, logits: Tensor, y: Tensor, group: Tensor) -> None:
        """Models from `first` on, all on the same rows. logits: [m, n, C]; y, group: [n]"""
        many, cells = len(logits), self.confusion.shape[1]
        if many > 1 and many * cells > CELLS:
            half = many // 2
            self.add(first, logits[:half], y, group)
            return self.add(first + half, logits[half:], y, group)
        here = slice(first, first + many)
        cell = (group * self.classes + y) * self.classes + logits.argmax(dim=2)  # [m, n]
        cell = cell + cells * torch.arange(many, device=cell.device).unsqueeze(1)
        self.confusion[here] += torch.bincount(cell.flatten(), minlength=many * cells).reshape(
            many, cells
        )
        rows = (
            cross_entropy(logits.flatten(0, 1), y.repeat(many), reduction="none")
            .double()
            .reshape(many, -1)
        )
        self.loss[here] += (
            rows.sum(dim=1, keepdim=True) if self.groups == 1 else self._by_group(rows, group)
        )

    def _by_group(self, rows: Tensor, group: Tensor) -> Tensor:
        """rows: [m, n] -> [m, groups]"""
        return torch.zeros(len(rows), self.groups, dtype=rows.dtype, device=rows.device).index_add_(
            1, group, rows
        )

    def scores(self) -> ConfusionCounts:
        shape = (len(self.loss), self.groups, self.classes, self.classes)
        return ConfusionCounts(self.confusion.reshape(shape).cpu(), self.loss.cpu())


class PairCounter:
    """Counts what models predict, each on rows of its own. A row that only pads counts for a
    pair behind the last, which nobody reads.
    """

    def __init__(self, pairs: int, classes: int, device: torch.device, examples: bool):
        self.pairs, self.classes = pairs, classes
        self.confusion = torch.zeros(
            (pairs + 1) * classes * classes, dtype=torch.int64, device=device
        )
        self.loss = torch.zeros(pairs + 1, dtype=torch.float64, device=device)
        self.seen: list[tuple[Tensor, ...]] | None = [] if examples else None

    def add(self, pair: Tensor, logits: Tensor, y: Tensor, ids: Tensor) -> None:
        """logits: [n, C]; pair, y, ids: [n]"""
        predicted = logits.argmax(dim=1)
        cell = (pair * self.classes + y) * self.classes + predicted
        self.confusion += torch.bincount(cell, minlength=len(self.confusion))
        self.loss.index_add_(0, pair, cross_entropy(logits, y, reduction="none").double())
        if self.seen is not None:
            others = logits.scatter(1, y.unsqueeze(1), float("-inf")).amax(dim=1)
            margin = logits.gather(1, y.unsqueeze(1)).squeeze(1) - others
            self.seen.append((pair, ids, predicted == y, margin.float()))

    def scores(self) -> PairCounts:
        confusion = self.confusion.reshape(-1, self.classes, self.classes)[: self.pairs].cpu()
        return PairCounts(
            confusion,
            self.loss[: self.pairs].cpu(),
            None if self.seen is None else self._verdicts(),
        )

    def _verdicts(self) -> ExampleResults:
        assert self.seen is not None
        columns = (
            [torch.cat(parts).cpu().numpy() for parts in zip(*self.seen, strict=True)]
            if self.seen
            else [np.empty(0)] * 4
        )
        pair, ids, right, margin = columns
        order = np.lexsort((ids, pair))  # the same on every engine
        order = order[pair[order] < self.pairs]
        return ExampleResults(
            pair[order].astype(np.int64),
            ids[order].astype(np.int64),
            right[order].astype(bool),
            margin[order].astype(np.float32),
        )
