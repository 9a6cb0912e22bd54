"""A worker of the engine `ray`: many clients, an engine inside, and no state that a round could miss when it dies.

Nothing here imports ray: a worker is a plain class, which Ray makes an actor of.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from remanence.engines.loop import Loop
from remanence.engines.shipping import Arrays, Parcel, TorchSettings, pack, receive_task, unpack
from remanence.engines.stacked import Stacked
from remanence.errors import InputError
from remanence.local import Task
from remanence.types import Reply

INNER = ("loop", "stacked")


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


class Worker:
    """Does what it is asked, with everything it needs in the question but the data and the task."""

    def __init__(self, shell: bytes, examples: Arrays, device: str, inner: Inner, settings: TorchSettings):
        settings.apply()
        if device == "cpu":
            torch.set_num_threads(1)  # one worker a core
        self.device = torch.device(device)
        self.task = receive_task(Parcel(shell, examples), self.device)
        self.engine = make_inner(inner, self.task)
        self.by_rows = self.engine if isinstance(self.engine, Loop) else Loop(self.task)

    def ready(self) -> int:
        """Answered once the data are in place. -> the process"""
        return os.getpid()

    def train(self, for_all: Any, job: Any) -> Any:
        """for_all: the model, or None where each client has its own in the job, and what the server shares. -> a packed Reply"""
        start, shared = unpack(for_all, self.device)
        mine = unpack(job, self.device)._replace(shared=shared)
        whole = mine if start is None else mine._replace(start=start)
        return pack(Reply.join(list(self.engine.train(whole))))

    def score(self, models: Any, split: str, owners: np.ndarray | None, time_step: int) -> Any:
        """Some of the models on all rows."""
        return pack(self.engine.score(unpack(models, self.device), split, owners, time_step))

    def score_rows(self, models: Any, split: str, ids: np.ndarray, groups: np.ndarray, count: int) -> Any:
        """All models on some of the rows."""
        rows, of_group = torch.tensor(ids, device=self.device), torch.tensor(groups, device=self.device)
        return pack(self.by_rows.score_rows(unpack(models, self.device), split, rows, of_group, count))

    def score_pairs(self, models: Any, which: np.ndarray, owners: np.ndarray, split: str, time_step: int, verdicts: bool) -> Any:
        """Each model on rows of its own."""
        return pack(self.engine.score_pairs(unpack(models, self.device), which.copy(), owners.copy(), split, time_step, verdicts))
