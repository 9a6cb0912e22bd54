"""The engine `ray`: the clients of a round distributed over the workers of a Ray cluster.

The examples are put into the object store once, and the global model once a round; every worker of
a node reads them there. Clients are divided by their number of steps, so that all workers end
together. Models that are only averaged stay with the workers, which send only their sum
(`partial_sums.py`). In decentralized methods the models of all peers are in the store
(`model_store.py`).

Ray runs whatever code a driver sends: use it among machines that trust each other, with token
authentication (RAY_AUTH_MODE=token) where others can reach the network.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.errors import InputError
from remanence.core.types import ModelState, Reply
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.packing import pack
from remanence.engines.ray.checks import check_ray
from remanence.engines.ray.connection import connect, count_resources, disconnect
from remanence.engines.ray.model_store import ModelStore
from remanence.engines.ray.partial_sums import RemoteReplies
from remanence.engines.ray.pool import ActorPool, ActorRequest, acquire_pool, release_pool
from remanence.engines.ray.serialization import ByteCounter, TorchSettings, send_task, unpack
from remanence.engines.ray.work_parts import balance
from remanence.engines.ray.worker import InnerEngine, TaskRef, Worker, choose_inner
from remanence.engines.vectorized import MAX_STACK
from remanence.training.server_step import aggregator_of
from remanence.training.task import TrainingTask

# Parts of a round for each worker where clients run one by one: at the end of a round the others
# wait for one part of the last worker at most.
PARTS_PER_WORKER = 4


class RayEngine(BaseEngine):
    """Trains and evaluates in actors, each with an engine inside.

    The cluster is connected, and actors are started, when they are first needed.

    Args:
        task: What is trained.
        workers: Actors; 0: as many as the cluster's cores, or its GPUs, have space for. Never more
            than there are clients.
        inner: "sequential" or "vectorized"; empty: the fastest there.
        stack: As in `VectorizedEngine`; 0: its default.
        execution: As in `VectorizedEngine`, for the workers. The engine's own attribute stays
            "eager", so that training at the server is not compiled.
        address: Of a running cluster; empty: see `connection.connect`.
        device: "cpu" or "cuda", where the workers compute; empty: the device of the task.
        cpus: Cores of a worker, which computes with as many threads on a CPU.
        gpus: A worker's share of a GPU, at most 1; 0: a whole one on cuda, else none.
        timeout: Seconds after which a worker that has not answered is lost; 0: never.
        retries: How often lost work is done again before the run fails.
    """

    name = "ray"

    def __init__(
        self,
        task: TrainingTask,
        workers: int = 0,
        *,
        inner: str = "",
        stack: int = 0,
        execution: str = "auto",
        address: str = "",
        device: str = "",
        cpus: float = 1,
        gpus: float = 0,
        timeout: float = 1800.0,
        retries: int = 3,
    ):
        super().__init__()
        check_ray(task, timeout, inner=inner, cpus=cpus, gpus=gpus, retries=retries, device=device)
        self.task, self.workers, self.address = task, workers, address
        self.timeout, self.retries = timeout, retries
        self.device = device or task.info.device.type
        self.cpus, self.gpus = float(cpus), float(gpus) or float(self.device == "cuda")
        self.inner = InnerEngine(
            inner or choose_inner(task, self.device), stack or MAX_STACK[self.device], execution
        )
        self.bundle = send_task(task)
        self.pool: ActorPool | None = None
        # engines of one process with the same key share a pool
        self.pool_key: Any = None
        self.task_ref: TaskRef | None = None
        self.store, self.traffic = ModelStore(self._put), ByteCounter()
        # training at the server reads every model, and without a server every client needs its own
        method = task.method
        self.keeps_models = (
            aggregator_of(method).is_decomposable
            and method.part_filling("server_train") is None
            and method.has_server
        )

    def train(self, work: ClientWork) -> Iterator[Reply]:
        pool = self.assemble()
        shared_args = self._put(
            pack((None if work.per_client_start else work.start, work.broadcast))
        )
        # only a large stack is worth it
        count = len(pool.slots) * (1 if self.inner.name == "vectorized" else PARTS_PER_WORKER)
        slices = balance(client_plan.expected_steps(self.task, work), count)
        rest = work.without_model()
        requests = [
            (
                shared_args,
                pack(rest.select(torch.from_numpy(places))),
                self.store.pick(work.start, places) if work.per_client_start else None,
            )
            for places in slices
        ]
        if not self.keeps_models:
            for _, (reply, degraded_reasons) in self.map_unordered("train", requests):
                self.add_degraded_reasons(degraded_reasons)
                yield unpack(reply, self.task.info.device)
            return
        remote = RemoteReplies(self, work, shared_args, requests)
        for number, remote_reply in self.map_unordered("train_and_keep", requests):
            yield remote.attach(number, remote_reply)

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        pool, count = self.assemble(), models.num_models
        if count >= len(pool.slots):  # a model or more for each worker
            picked = [
                self.store.pick(models, part)
                for part in evaluation.split_evenly(count, len(pool.slots))
            ]
            counts: list[ConfusionCounts] = self._ask(
                "score", [(part, split, owners, time_step) for part in picked]
            )
            return ConfusionCounts(
                torch.cat([each.confusion for each in counts]),
                torch.cat([each.loss for each in counts]),
            )
        ids, groups, count = evaluation.eval_rows(self.task, split, owners, time_step)
        packed, rows, group = self._put(pack(models)), ids.cpu().numpy(), groups.cpu().numpy()
        # one request, even without examples
        parts = evaluation.split_evenly(len(rows), len(pool.slots)) or [np.empty(0, dtype=np.int64)]
        counts = self._ask(
            "score_rows", [(packed, split, rows[part], group[part], count) for part in parts]
        )
        return ConfusionCounts(
            torch.stack([each.confusion for each in counts]).sum(dim=0),
            torch.stack([each.loss for each in counts]).sum(dim=0),
        )

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        sizes = evaluation.split_rows(self.task, split, time_step).sizes[owners]
        parts = balance(sizes, len(self.assemble().slots)) if len(which) else []
        if not parts:
            return evaluation.PairCounter(
                0, self.task.info.num_classes, torch.device("cpu"), examples
            ).scores()
        requests = []
        for part in parts:
            # a worker gets only the models that it evaluates
            used, local = np.unique(which[part], return_inverse=True)
            requests.append(
                (self.store.pick(models, used), local, owners[part], split, time_step, examples)
            )
        return evaluation.join_pairs(self._ask("score_pairs", requests), parts)

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        pool, count, rows = self.assemble(), models.num_models, ids.cpu().numpy()
        # a model or more for each worker; else all models, and some of the examples
        by_models = count >= len(pool.slots)
        parts = evaluation.split_evenly(count if by_models else len(rows), len(pool.slots))
        all_models = np.arange(count)
        requests = [
            (self.store.pick(models, part), rows)
            if by_models
            else (self.store.pick(models, all_models), rows[part])
            for part in parts
        ]
        return torch.cat(self._ask("predict_logits", requests), dim=0 if by_models else 1).to(
            self.task.info.device
        )

    def close(self) -> None:
        if self.pool is not None:
            self.pool = self.task_ref = None
            self.store = ModelStore(self._put)
            release_pool(self.pool_key)
            disconnect()

    def assemble(self) -> ActorPool:
        """The pool of workers, started or shared with another engine the first time."""
        if self.pool is None:
            connect(self.address, self.workers)
            try:
                self.pool = self._acquire_pool()
            except BaseException:
                disconnect()
                raise
            self.task_ref = self._put_task()
        return self.pool

    def _put_task(self) -> TaskRef:
        import ray

        return TaskRef(
            uuid.uuid4().hex,
            ray.put(self.bundle.pickled),
            ray.put(self.bundle.examples),
            self.inner,
        )

    def _acquire_pool(self) -> ActorPool:
        import ray

        settings, threads = TorchSettings.read(), max(1, int(self.cpus))
        resource, part = ("GPU", self.gpus) if self.device == "cuda" else ("CPU", self.cpus)
        found = count_resources(resource)
        if found < part:
            raise InputError(
                f"the Ray cluster has {found:g} {resource} and a worker needs {part:g}:"
                " add a node that has more, use another device,"
                f" or give a worker less (ray.{resource.lower()}s)"
            )
        count = min(self.workers or int(found / part), self.task.info.num_clients)
        actor = ray.remote(Worker).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self.pool_key = (
            self.address,
            self.device,
            count,
            self.cpus,
            self.gpus,
            settings,
            self.retries,
            self.timeout,
        )
        return acquire_pool(
            self.pool_key,
            lambda: ActorPool(
                lambda: actor.remote(self.device, threads, settings),
                count,
                self.retries,
                self.timeout,
            ),
        )

    def map_unordered(
        self,
        method: str,
        requests: Sequence[tuple[Any, ...]],
        affinity: Iterable[int] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Call one method of many workers with this engine's task.

        Args:
            method: Of `Worker`.
            requests: The other arguments of each call.
            affinity: Which worker each call should go to if it is free; None: in turn.

        Yields:
            The number of a request and its answer, in any order.
        """
        pool, positions = self.assemble(), range(len(requests)) if affinity is None else affinity
        calls = [
            ActorRequest(method, (self.task_ref, *request), slot)
            for request, slot in zip(requests, positions, strict=True)
        ]
        self.traffic.count(down=tuple(requests))
        for number, answer in pool.map_unordered(calls):
            self.traffic.count(up=answer)
            yield number, answer

    def _ask(self, method: str, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All answers, in the order of the requests."""
        answers = dict(self.map_unordered(method, requests))
        return [unpack(answers[number], torch.device("cpu")) for number in range(len(requests))]

    def _put(self, packed: Any) -> Any:
        """Put into the object store, for all workers."""
        import ray

        self.traffic.count(down=packed)
        return ray.put(packed)
