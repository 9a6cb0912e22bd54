"""A worker of the engine `ray`: many clients, an engine inside, and no state that a round could miss when it dies.

A worker is a plain class, which Ray makes an actor of. It serves every engine of the process that started it, so that training and fine-tuning do not keep
cores or GPUs from each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.engines.loop import Loop
from remanence.engines.shipping import Parcel, TorchSettings, pack, receive_task, unpack
from remanence.engines.stacked import Stacked
from remanence.errors import InputError
from remanence.local import Task
from remanence.types import Reply

INNER = ("loop", "stacked")
KEPT = 4  # tasks at hand: a run has one, and another where personal models are fine-tuned


@dataclass(frozen=True)
class Inner:
    """The engine inside a worker: which, its largest stack, and how the steps of a stack are run."""

    name: str
    stack: int
    steps: str


def choose_inner(task: Task, device: str) -> str:
    """What is fastest where it will run: convolutions on a CPU one client at a time, all else as a stack where that is possible."""
    if device == "cpu" and task.model.has_convolutions:
        return "loop"
    try:
        Stacked(task)
    except InputError:
        return "loop"
    return "stacked"


def make_inner(inner: Inner, task: Task) -> Loop | Stacked:
    if inner.name == "stacked":
        return Stacked(task, inner.stack, inner.steps)
    return Loop(task, channels_last=task.world.device.type == "cpu")


class Assignment(NamedTuple):
    """Which task a call is about, and where it lies: a worker fetches it once, when it first hears of it, and so does the one that replaces it."""

    token: str
    shell: Any  # references into the object store, which travel as such because they are not arguments of their own
    examples: Any
    inner: Inner


class Post(NamedTuple):
    """A task as a worker has it."""

    engine: Loop | Stacked
    by_rows: Loop


class Worker:
    """Does what it is asked. All it keeps is what it can fetch again."""

    def __init__(self, device: str, settings: TorchSettings):
        settings.apply()
        if device == "cpu":
            torch.set_num_threads(1)  # one worker a core
        self.device = torch.device(device)
        self.posts: dict[str, Post] = {}

    def ready(self) -> int:
        """Answered once it is there. -> the process"""
        return os.getpid()

    def train(self, assignment: Assignment, for_all: Any, job: Any) -> Any:
        """for_all: the model, or None where each client has its own in the job, and what the server shares. -> a packed Reply"""
        start, shared = unpack(for_all, self.device)
        mine = unpack(job, self.device)._replace(shared=shared)
        whole = mine if start is None else mine._replace(start=start)
        return pack(Reply.join(list(self._post(assignment).engine.train(whole))))

    def score(self, assignment: Assignment, models: Any, split: str, owners: np.ndarray | None, time_step: int) -> Any:
        """Some of the models on all rows."""
        return pack(self._post(assignment).engine.score(unpack(models, self.device), split, owners, time_step))

    def score_rows(self, assignment: Assignment, models: Any, split: str, ids: np.ndarray, groups: np.ndarray, count: int) -> Any:
        """All models on some of the rows."""
        rows, of_group = torch.tensor(ids, device=self.device), torch.tensor(groups, device=self.device)
        return pack(self._post(assignment).by_rows.score_rows(unpack(models, self.device), split, rows, of_group, count))

    def score_pairs(
        self, assignment: Assignment, models: Any, which: np.ndarray, owners: np.ndarray, split: str, time_step: int, verdicts: bool
    ) -> Any:
        """Each model on rows of its own."""
        engine = self._post(assignment).engine
        return pack(engine.score_pairs(unpack(models, self.device), which.copy(), owners.copy(), split, time_step, verdicts))

    def _post(self, assignment: Assignment) -> Post:
        if assignment.token not in self.posts:
            import ray

            task = receive_task(Parcel(*ray.get([assignment.shell, assignment.examples])), self.device)
            engine = make_inner(assignment.inner, task)
            self.posts[assignment.token] = Post(engine, engine if isinstance(engine, Loop) else Loop(task))
            while len(self.posts) > KEPT:
                self.posts.pop(next(iter(self.posts)))
        return self.posts[assignment.token]
