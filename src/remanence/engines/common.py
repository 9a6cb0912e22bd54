"""What every engine does the same way: plans, keys, the shape of a reply, counting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from remanence import keys, trees
from remanence.compose import Scoped
from remanence.data.batches import Examples, Plan, count_steps, plan_batches
from remanence.local import Task
from remanence.trees import Tree
from remanence.types import Accept, Context, Facts, Job, Phase, Reply, Scores, Start


def make_context(task: Task, job: Job, place: int | Tensor) -> Context:
    """The context of one client of the cohort (an integer) or of a stack of them (a tensor of places)."""
    device = task.world.device
    clients = torch.from_numpy(job.clients)[place]
    client_keys = [job.key.fold("client", client).tensor() for client in np.atleast_1d(clients.numpy()).tolist()]
    return Context(
        client=clients.to(device),
        round=torch.tensor(job.round, device=device),
        start=job.start.take(place) if job.personal_start else job.start,
        shared=job.shared,
        own=trees.take(job.own, place),
        memory={},
        facts=Facts(*(fact[place] for fact in job.facts)),
        step=torch.tensor(0, device=device),
        steps=torch.zeros_like(clients).to(device),
        hyper=task.number_tensors(),
        rule=task.tensors(job.rule),
        key=torch.stack(client_keys).reshape(clients.shape).to(device),
        world=task.world,
    )


def at(ctx: Context, moment: str, steps: int | Tensor | None = None) -> Context:
    """The context at a moment outside the steps, with randomness of its own."""
    return ctx._replace(steps=ctx.steps if steps is None else torch.zeros_like(ctx.steps) + steps, key=keys.fold_in(ctx.key, moment))


def enter_phase(ctx: Context, number: int, steps: int | Tensor) -> Context:
    """The context of a phase: its number of steps, and randomness of its own."""
    return ctx._replace(steps=torch.zeros_like(ctx.steps) + steps, key=keys.fold_in(keys.fold_in(ctx.key, "phase"), number))


def enter_step(ctx: Context, step: int) -> Context:
    """The context of one step of a phase."""
    return ctx._replace(step=torch.tensor(step, device=ctx.step.device), key=keys.fold_in(ctx.key, step))


def plan_phase(task: Task, job: Job, client: int, number: int, phase: Phase) -> Plan:
    """The batches of one client in one phase: a function of keys and of how many rows it has, nothing else."""
    count = len(task.population.at(job.time_step).train.of(client))
    key = job.key.fold("client", client, "plan", number)
    return plan_batches(key, count, task.batch, phase.epochs, phase.steps, task.drop_last)


def expected_steps(task: Task, job: Job) -> np.ndarray:
    """Local steps of each client of the cohort over all phases. -> [k]"""
    sizes = task.population.at(job.time_step).train.sizes[job.clients]
    return np.array([sum(count_steps(int(n), task.batch, p.epochs, p.steps, task.drop_last) for p in task.phases) for n in sizes])


def scoped_accept(task: Task, phase: Phase) -> Accept:
    """A phase's `accept`, seeing the subtree of the part that brought the phases."""
    owner = task.method.owner("phases")
    assert phase.accept is not None
    return phase.accept if owner is None else Scoped(owner, phase.accept)


def make_reply(task: Task, job: Job, clients: np.ndarray, model: Start, extras: Tree, own: Tree, loss: Tensor) -> Reply:
    """What k clients send back; all trees stacked."""
    sizes, device = task.population.at(job.time_step).train.sizes[clients], task.world.device
    return Reply(
        client=torch.from_numpy(clients.astype(np.int64)).to(device),
        round=torch.full((len(clients),), job.round, dtype=torch.int64, device=device),
        params=trees.restrict(model.params, task.sent_names()),
        buffers=trees.restrict(model.buffers, task.sent_buffers()),
        extras=extras,
        weight=torch.from_numpy(sizes.astype(np.float64)).to(device),
        own=own,
        loss=loss,
    )


def examples_of(task: Task, split: str) -> Examples:
    return task.test if split == "test" else task.train


def rows_to_score(task: Task, split: str, owners: np.ndarray | None, time_step: int) -> tuple[Tensor, Tensor, int]:
    """-> ids [n], group of each row [n], number of groups"""
    device = task.world.device
    holdings = task.population.at(time_step)
    rows = holdings.train if split == "train" else holdings.valid
    if owners is None or split in ("test", "public"):
        pooled = {"test": torch.arange(len(task.test.y)), "public": task.public}.get(split, torch.from_numpy(rows.ids)).to(device)
        return pooled, torch.zeros_like(pooled), 1
    parts = [rows.of(int(owner)) for owner in owners]
    groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return torch.from_numpy(np.concatenate(parts)).to(device), torch.from_numpy(groups).to(device), len(parts)


class Tally:
    """Counts what models predict, group by group."""

    def __init__(self, models: int, groups: int, classes: int, device: torch.device):
        self.groups, self.classes = groups, classes
        self.confusion = torch.zeros(models, groups * classes * classes, dtype=torch.int64, device=device)
        self.loss = torch.zeros(models, groups, dtype=torch.float64, device=device)

    def add(self, model: int, logits: Tensor, y: Tensor, group: Tensor) -> None:
        """logits: [n, C]; y, group: [n]"""
        cell = (group * self.classes + y) * self.classes + logits.argmax(dim=1)
        self.confusion[model] += torch.bincount(cell, minlength=self.confusion.shape[1])
        rows = cross_entropy(logits, y, reduction="none").double()
        self.loss[model] += rows.sum() if self.groups == 1 else torch.zeros_like(self.loss[model]).index_add_(0, group, rows)

    def scores(self) -> Scores:
        shape = (len(self.loss), self.groups, self.classes, self.classes)
        return Scores(self.confusion.reshape(shape).cpu(), self.loss.cpu())
