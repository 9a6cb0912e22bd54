"""A worker of the engine `ray`: an engine for many clients, and no state that a round needs.

`Worker` is a plain class, of which Ray makes an actor. It serves every engine of the process that
started it, so that training and fine-tuning share cores and GPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.slots import ServerContext
from remanence.core.types import ModelState, Reply
from remanence.engines.ray.model_store import ModelRefs
from remanence.engines.ray.partial_sums import FETCH_TIMEOUT, RemoteReply
from remanence.engines.ray.serialization import (
    TaskBundle,
    TorchSettings,
    pack,
    receive_task,
    unpack,
)
from remanence.engines.sequential import SequentialEngine
from remanence.engines.stack_checks import check_stackable
from remanence.engines.vectorized import VectorizedEngine
from remanence.training.server_step import aggregator_of
from remanence.training.task import TrainingTask

MAX_TASKS = 4  # kept by a worker; a run has one, and another where models are fine-tuned


@dataclass(frozen=True)
class InnerEngine:
    """The engine inside a worker: which, its largest stack, and how the steps of a stack are
    run.
    """

    name: str
    stack: int
    steps: str


def choose_inner(task: TrainingTask, device: str) -> str:
    """The fastest on a device: one client at a time for convolutions on a CPU, else stacks if
    possible.
    """
    if device == "cpu" and task.model.has_convolutions:
        return "sequential"
    try:
        check_stackable(task)
    except InputError:
        return "sequential"
    return "vectorized"


def make_inner(inner: InnerEngine, task: TrainingTask) -> SequentialEngine | VectorizedEngine:
    if inner.name == "vectorized":
        return VectorizedEngine(task, inner.stack, inner.steps)
    return SequentialEngine(task, channels_last=task.info.device.type == "cpu")


class TaskRef(NamedTuple):
    """Which task a call uses, and where it is: a worker fetches it once, when it first
    hears of it, and so does the one that replaces it.
    """

    token: str
    # references into the object store, which travel as such because they are not arguments of their
    # own
    pickled: Any
    examples: Any
    inner: InnerEngine


class LoadedTask(NamedTuple):
    """A task of a worker, with its engines."""

    engine: SequentialEngine | VectorizedEngine
    by_rows: SequentialEngine


class Worker:
    """Serves calls. It keeps only what it can fetch again."""

    def __init__(self, device: str, threads: int, settings: TorchSettings):
        settings.apply()
        if device == "cpu":
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.tasks: dict[str, LoadedTask] = {}

    def ready(self) -> int:
        """Called to learn that the worker has started. -> the process id"""
        return os.getpid()

    def train(
        self, task_ref: TaskRef, shared_args: Any, work: Any, models: ModelRefs | None
    ) -> Any:
        """for_all: the model, or None where each client has its own among `models`, and what
        the server shares. -> a packed Reply
        """
        return pack(self._train(task_ref, self._whole(shared_args, work, models)))

    def train_and_keep(
        self, task_ref: TaskRef, shared_args: Any, work: Any, models: ModelRefs | None
    ) -> RemoteReply:
        """The same, but the models stay in the store, with what a sum over them may need."""
        import ray

        full_work = self._whole(shared_args, work, models)
        reply = self._train(task_ref, full_work)
        delta = pytree.sub(reply.params, full_work.start.params)
        squares = [way.double().flatten(1).square().sum(dim=1) for way in delta.values()]
        form = {name: (tuple(value.shape[1:]), value.dtype) for name, value in reply.params.items()}
        params: Tree = dict(reply.params)
        rest, finite = (
            reply._replace(params={}),
            pytree.finite({"params": params}, reply.num_clients),
        )
        stored = ray.put(pack(reply._replace(client_state={})))
        return RemoteReply(
            pack(rest), form, pack(finite), pack(torch.stack(squares).sum(dim=0).sqrt()), stored
        )

    def partial_sum(
        self,
        task_ref: TaskRef,
        shared_args: Any,
        server_args: Any,
        stored: list[Any],
        rows: list[np.ndarray],
        weights: list[Any],
    ) -> Any:
        """The method's partial sum over models that lie in the store, one piece after the other. ->
        packed; None where some of them are gone

        server_args: round, model (None: the one of the round), state and key of the server; rows,
            weights: of each piece
        """
        import ray

        try:
            pieces = ray.get(stored, timeout=FETCH_TIMEOUT)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None
        task = self._load_task(task_ref).engine.task
        round, start, state, key = unpack(server_args, self.device)
        srv = ServerContext(
            round,
            start or ModelState(*unpack(shared_args, self.device)[0]),
            state,
            task.hparam_tensors(),
            key,
            task.info,
        )
        partial, total = aggregator_of(task.method).partial, None
        for piece, row, share in zip(pieces, rows, weights, strict=True):
            replies: Reply = unpack(piece, self.device).select(
                torch.tensor(row, device=self.device)
            )
            part = partial(torch.tensor(share, device=self.device), replies, srv)
            total = part if total is None else pytree.add(total, part)
        return pack(total)

    def score(
        self,
        task_ref: TaskRef,
        models: ModelRefs,
        split: str,
        owners: np.ndarray | None,
        time_step: int,
    ) -> Any:
        """Some of the models on all examples."""
        return pack(
            self._load_task(task_ref).engine.score(
                models.open(self.device), split, owners, time_step
            )
        )

    def score_rows(
        self,
        task_ref: TaskRef,
        models: Any,
        split: str,
        ids: np.ndarray,
        groups: np.ndarray,
        count: int,
    ) -> Any:
        """All models on some of the examples."""
        rows, of_group = (
            torch.tensor(ids, device=self.device),
            torch.tensor(groups, device=self.device),
        )
        return pack(
            self._load_task(task_ref).by_rows.score_rows(
                unpack(models, self.device), split, rows, of_group, count
            )
        )

    def score_pairs(
        self,
        task_ref: TaskRef,
        models: ModelRefs,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
        examples: bool,
    ) -> Any:
        """Each model on its own examples."""
        engine = self._load_task(task_ref).engine
        return pack(
            engine.score_pairs(
                models.open(self.device), which.copy(), owners.copy(), split, time_step, examples
            )
        )

    def predict_logits(self, task_ref: TaskRef, models: ModelRefs, ids: np.ndarray) -> Any:
        """Logits of models on some examples."""
        return pack(
            self._load_task(task_ref).engine.predict_logits(
                models.open(self.device), torch.tensor(ids, device=self.device)
            )
        )

    def _whole(self, shared_args: Any, work: Any, models: ModelRefs | None) -> ClientWork:
        start, broadcast = unpack(shared_args, self.device)
        full_work: ClientWork = unpack(work, self.device)._replace(
            broadcast=broadcast, start=start if models is None else models.open(self.device)
        )
        return full_work

    def _train(self, task_ref: TaskRef, work: ClientWork) -> Reply:
        return Reply.concat(list(self._load_task(task_ref).engine.train(work)))

    def _load_task(self, task_ref: TaskRef) -> LoadedTask:
        if task_ref.token not in self.tasks:
            import ray

            task = receive_task(
                TaskBundle(*ray.get([task_ref.pickled, task_ref.examples])), self.device
            )
            engine = make_inner(task_ref.inner, task)
            self.tasks[task_ref.token] = LoadedTask(
                engine, engine if isinstance(engine, SequentialEngine) else SequentialEngine(task)
            )
            while len(self.tasks) > MAX_TASKS:
                self.tasks.pop(next(iter(self.tasks)))
        return self.tasks[task_ref.token]
