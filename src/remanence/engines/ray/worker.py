"""A worker of the engine `ray`: an engine for many clients, and no state that a round needs.

`Worker` is a plain class, which the pool starts as a Ray actor. It serves every engine of the
process that started it, so that training and fine-tuning share cores and GPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.contexts import ServerContext
from remanence.core.engine import ClientWork
from remanence.core.errors import InputError
from remanence.core.pytree import Tree
from remanence.core.types import ModelState, Reply
from remanence.engines.packing import pack
from remanence.engines.ray.model_store import ModelRefs
from remanence.engines.ray.partial_sums import FETCH_TIMEOUT, RemoteReply
from remanence.engines.ray.serialization import TaskBundle, TorchSettings, receive_task, unpack
from remanence.engines.sequential import SequentialEngine
from remanence.engines.stack_checks import check_stackable
from remanence.engines.vectorized import VectorizedEngine
from remanence.training.server_step import aggregator_of
from remanence.training.task import TrainingTask

MAX_TASKS = 4  # kept by a worker; a run has one, and another where models are fine-tuned


@dataclass(frozen=True)
class InnerEngine:
    """The engine inside a worker."""

    name: str
    stack: int  # the most clients of a stack
    execution: str  # how the steps of a stack run


def choose_inner(task: TrainingTask, device: str) -> str:
    """The fastest on a device: one client at a time for convolutions on a CPU, else stacks where
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
        return VectorizedEngine(task, inner.stack, inner.execution)
    return SequentialEngine(task, channels_last=task.info.device.type == "cpu")


class TaskRef(NamedTuple):
    """Which task a call uses, and where it is: a worker fetches a task that it does not have."""

    token: str
    # references into the object store; Ray resolves only those that are arguments themselves
    pickled: Any
    examples: Any
    inner: InnerEngine


class LoadedTask(NamedTuple):
    """A task of a worker, with its engines."""

    engine: SequentialEngine | VectorizedEngine
    by_rows: SequentialEngine


class Worker:
    """Answers calls. It keeps no state but tasks, which it can fetch again."""

    def __init__(self, device: str, threads: int, settings: TorchSettings):
        settings.apply()
        if device == "cpu":
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.tasks: dict[str, LoadedTask] = {}

    def ready(self) -> int:
        """Return the process id, as soon as the worker has started."""
        return os.getpid()

    def train(
        self, task_ref: TaskRef, shared_args: Any, work: Any, models: ModelRefs | None
    ) -> tuple[Any, list[str]]:
        """Train some clients.

        Args:
            task_ref: The task.
            shared_args: Packed: the model, or None where each client has its own, and the
                broadcast.
            work: Packed: the rest of the clients' work.
            models: The clients' own models, if they have any.

        Returns:
            A packed reply, and why the engine is slower than requested.
        """
        reply, degraded_reasons = self._train(task_ref, self._whole(shared_args, work, models))
        return pack(reply), degraded_reasons

    def train_and_keep(
        self, task_ref: TaskRef, shared_args: Any, work: Any, models: ModelRefs | None
    ) -> RemoteReply:
        """The same, but the models stay in the store, with what a sum over them may need."""
        import ray

        full_work = self._whole(shared_args, work, models)
        reply, degraded_reasons = self._train(task_ref, full_work)
        delta = pytree.sub(reply.params, full_work.start.params)
        squares = [moved.double().flatten(1).square().sum(dim=1) for moved in delta.values()]
        layout = {
            name: (tuple(value.shape[1:]), value.dtype) for name, value in reply.params.items()
        }
        params: Tree = dict(reply.params)
        rest, finite = (
            reply._replace(params={}),
            pytree.finite({"params": params}, reply.num_clients),
        )
        stored = ray.put(pack(reply._replace(client_state={})))
        update_norm = torch.stack(squares).sum(dim=0).sqrt()
        return RemoteReply(
            pack(rest), layout, pack(finite), pack(update_norm), stored, degraded_reasons
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
        """The method's partial sum over models in the store.

        Args:
            task_ref: The task.
            shared_args: As for `train`.
            server_args: Packed: the server's round, model (None: that of `shared_args`), number
                of replies, state and key.
            stored: References to shards of replies.
            rows: Which replies of each shard.
            weights: Of these replies, by shard.

        Returns:
            The packed sum; None where some of the models are lost.
        """
        import ray

        try:
            shards = ray.get(stored, timeout=FETCH_TIMEOUT)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return None
        task = self._load_task(task_ref).engine.task
        round, start, num_replies, state, key = unpack(server_args, self.device)
        srv = ServerContext(
            round,
            start or ModelState(*unpack(shared_args, self.device)[0]),
            num_replies,
            state,
            task.hparam_tensors(),
            key,
            task.info,
        )
        partial, total = aggregator_of(task.method).partial, None
        for shard, row, share in zip(shards, rows, weights, strict=True):
            replies: Reply = unpack(shard, self.device).select(
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

    def _train(self, task_ref: TaskRef, work: ClientWork) -> tuple[Reply, list[str]]:
        engine = self._load_task(task_ref).engine
        return Reply.concat(list(engine.train(work))), list(engine.degraded_reasons)

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
