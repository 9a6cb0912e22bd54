"""A worker of the engine `ray`: many clients, an engine inside, and no state that a round could
miss when it dies.

A worker is a plain class, which Ray makes an actor of. It serves every engine of the process that
started it, so that training and fine-tuning do not keep cores or GPUs from each other.
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

KEPT = 4  # tasks at hand: a run has one, and another where personal models are fine-tuned


@dataclass(frozen=True)
class InnerEngine:
    """The engine inside a worker: which, its largest stack, and how the steps of a stack are
    run.
    """

    name: str
    stack: int
    steps: str


def choose_inner(task: TrainingTask, device: str) -> str:
    """What is fastest where it will run: convolutions on a CPU one client at a time, all else
    as a stack where that is possible.
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
    """Which task a call is about, and where it lies: a worker fetches it once, when it first
    hears of it, and so does the one that replaces it.
    """

    token: str
    # references into the object store, which travel as such because they are not arguments of their
    # own
    pickled: Any
    examples: Any
    inner: InnerEngine


class LoadedTask(NamedTuple):
    """A task as a worker has it."""

    engine: SequentialEngine | VectorizedEngine
    by_rows: SequentialEngine


class Worker:
    """Does what it is asked. All it keeps is what it can fetch again."""

    def __init__(self, device: str, threads: int, settings: TorchSettings):
        settings.apply()
        if device == "cpu":
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.posts: dict[str, LoadedTask] = {}

    def ready(self) -> int:
        """Answered once it is there. -> the process"""
        return os.getpid()

    def train(self, assignment: TaskRef, for_all: Any, work: Any, models: ModelRefs | None) -> Any:
        """for_all: the model, or None where each client has its own among `models`, and what
        the server shares. -> a packed Reply
        """
        return pack(self._train(assignment, self._whole(for_all, work, models)))

    def train_and_keep(
        self, assignment: TaskRef, for_all: Any, work: Any, models: ModelRefs | None
    ) -> RemoteReply:
        """The same, but the models stay here, in the store, with what else a sum over them may
        need.
        """
        import ray

        whole = self._whole(for_all, work, models)
        reply = self._train(assignment, whole)
        moved = pytree.sub(reply.params, whole.start.params)
        squares = [way.double().flatten(1).square().sum(dim=1) for way in moved.values()]
        form = {name: (tuple(value.shape[1:]), value.dtype) for name, value in reply.params.items()}
        params: Tree = dict(reply.params)
        rest, finite = (
            reply._replace(params={}),
            pytree.finite({"params": params}, reply.num_clients),
        )
        kept = ray.put(pack(reply._replace(client_state={})))
        return RemoteReply(
            pack(rest), form, pack(finite), pack(torch.stack(squares).sum(dim=0).sqrt()), kept
        )

    def partial_sum(
        self,
        assignment: TaskRef,
        for_all: Any,
        about: Any,
        kept: list[Any],
        rows: list[np.ndarray],
        weights: list[Any],
    ) -> Any:
        """The method's partial sum over models that lie in the store, one piece after the other. ->
        packed; None where some of them are gone

        about: round, model (None: the one of the round), state and key of the server; rows,
            weights: of each piece
        """
        import ray

        try:
            pieces = ray.get(kept, timeout=FETCH_TIMEOUT)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None
        task = self._load_task(assignment).engine.task
        round, start, state, key = unpack(about, self.device)
        srv = ServerContext(
            round,
            start or ModelState(*unpack(for_all, self.device)[0]),
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
        assignment: TaskRef,
        models: ModelRefs,
        split: str,
        owners: np.ndarray | None,
        time_step: int,
    ) -> Any:
        """Some of the models on all rows."""
        return pack(
            self._load_task(assignment).engine.score(
                models.open(self.device), split, owners, time_step
            )
        )

    def score_rows(
        self,
        assignment: TaskRef,
        models: Any,
        split: str,
        ids: np.ndarray,
        groups: np.ndarray,
        count: int,
    ) -> Any:
        """All models on some of the rows."""
        rows, of_group = (
            torch.tensor(ids, device=self.device),
            torch.tensor(groups, device=self.device),
        )
        return pack(
            self._load_task(assignment).by_rows.score_rows(
                unpack(models, self.device), split, rows, of_group, count
            )
        )

    def score_pairs(
        self,
        assignment: TaskRef,
        models: ModelRefs,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
        examples: bool,
    ) -> Any:
        """Each model on rows of its own."""
        engine = self._load_task(assignment).engine
        return pack(
            engine.score_pairs(
                models.open(self.device), which.copy(), owners.copy(), split, time_step, examples
            )
        )

    def predict_logits(self, assignment: TaskRef, models: ModelRefs, ids: np.ndarray) -> Any:
        """What models say of some rows."""
        return pack(
            self._load_task(assignment).engine.predict_logits(
                models.open(self.device), torch.tensor(ids, device=self.device)
            )
        )

    def _whole(self, for_all: Any, work: Any, models: ModelRefs | None) -> ClientWork:
        start, shared = unpack(for_all, self.device)
        whole: ClientWork = unpack(work, self.device)._replace(
            broadcast=shared, start=start if models is None else models.open(self.device)
        )
        return whole

    def _train(self, assignment: TaskRef, work: ClientWork) -> Reply:
        return Reply.concat(list(self._load_task(assignment).engine.train(work)))

    def _load_task(self, assignment: TaskRef) -> LoadedTask:
        if assignment.token not in self.posts:
            import ray

            task = receive_task(
                TaskBundle(*ray.get([assignment.pickled, assignment.examples])), self.device
            )
            engine = make_inner(assignment.inner, task)
            self.posts[assignment.token] = LoadedTask(
                engine, engine if isinstance(engine, SequentialEngine) else SequentialEngine(task)
            )
            while len(self.posts) > KEPT:
                self.posts.pop(next(iter(self.posts)))
        return self.posts[assignment.token]
