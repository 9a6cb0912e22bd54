"""Many machines and many GPUs: the clients of a round spread over the workers of a Ray cluster.

The examples are put into the object store once and the global model once a round; every worker of a
node reads them there. Clients are dealt out by the steps they have to make, so that all workers end
together. Models that are only averaged stay with the workers, and their sum alone travels
(`partial_sums.py`). Decentralized methods run the same way, many peers a worker, whose models lie in
the store for all (`model_store.py`).

Ray runs whatever code a driver sends: use it among machines that trust each other, with token
authentication (RAY_AUTH_MODE=token) where others share the network.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork, ConfusionCounts, ExampleResults, PairCounts
from remanence.core.errors import InputError
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.ray.checks import check_ray
from remanence.engines.ray.connection import connect, count_resources, disconnect
from remanence.engines.ray.model_store import ModelStore
from remanence.engines.ray.partial_sums import RemoteReplies
from remanence.engines.ray.pool import ActorPool, ActorRequest, acquire_pool, release_pool
from remanence.engines.ray.serialization import ByteCounter, TorchSettings, pack, send_task, unpack
from remanence.engines.ray.worker import InnerEngine, TaskRef, Worker, choose_inner
from remanence.engines.vectorized import MAX_STACK
from remanence.training.server_step import aggregator_of
from remanence.training.task import TrainingTask

# slices a worker gets in a round where clients run one by one: the last to end then keeps the
# others waiting for a quarter of its work
SHARES = 4


class RayEngine(BaseEngine):
    """Workers as actors, each with an engine of its own inside. Nothing is started before there is
    something to do.

    workers: 0 means as many as the cluster's cores, or its GPUs where the work is done there, have
        room for; never more than there are clients.
    inner: "sequential" or "vectorized"; empty: what is fastest there. stack, steps: as for `VectorizedEngine`.
    address: of a running cluster; empty: see `connection.connect`.
    device: "cpu" or "cuda", where the workers compute; empty: where the task is.
    cpus: cores of a worker, which on the CPU computes with as many threads. gpus: a worker's share
        of a GPU, at most 1; 0: a whole one where the device is cuda, else none.
    timeout: seconds after which a worker that has not answered counts as lost; 0: never. retries:
        how often lost work is done again before the run fails.
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
        self.parcel = send_task(task)
        self.crew: ActorPool | None = None
        # of the crew: engines of one process that want the same kind share it
        self.likeness: Any = None
        self.assignment: TaskRef | None = None
        self.shelf, self.traffic = ModelStore(self._put), ByteCounter()
        # a refinement looks at every model, and without a server every client needs its own back
        method = task.method
        self.keeps_models = (
            aggregator_of(method).is_decomposable
            and method.part_filling("server_train") is None
            and method.part_filling("peers") is None
        )

    def train(self, work: ClientWork) -> Iterator[Reply]:
        crew = self.assemble()
        for_all = self._put(pack((None if work.per_client_start else work.start, work.broadcast)))
        # a stack pays only if it is large
        shares = len(crew.members) * (1 if self.inner.name == "vectorized" else SHARES)
        slices = balance(client_plan.expected_steps(self.task, work), shares)
        models = [
            self.shelf.pick(work.start, places) if work.per_client_start else None
            for places in slices
        ]
        questions = [
            (for_all, pack(_subset_work(work, places)), some)
            for places, some in zip(slices, models, strict=True)
        ]
        if not self.keeps_models:
            for _, answer in self.map_unordered("train", questions):
                yield unpack(answer, self.task.info.device)
            return
        harvest = RemoteReplies(self, work, for_all, questions)
        for number, kept in self.map_unordered("train_and_keep", questions):
            yield harvest.attach(number, kept)

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        crew, many = self.assemble(), models.num_models
        if many >= len(crew.members):  # a model or more for everybody
            some = [self.shelf.pick(models, part) for part in _split(many, len(crew.members))]
            parts: list[ConfusionCounts] = self._ask(
                "score", [(part, split, owners, time_step) for part in some]
            )
            return ConfusionCounts(
                torch.cat([part.confusion for part in parts]),
                torch.cat([part.loss for part in parts]),
            )
        ids, groups, count = evaluation.eval_rows(self.task, split, owners, time_step)
        packed, rows, group = self._put(pack(models)), ids.cpu().numpy(), groups.cpu().numpy()
        # somebody has to say that there is nothing to say
        shares = _split(len(rows), len(crew.members)) or [np.empty(0, dtype=np.int64)]
        parts = self._ask(
            "score_rows", [(packed, split, rows[share], group[share], count) for share in shares]
        )
        return ConfusionCounts(
            torch.stack([part.confusion for part in parts]).sum(dim=0),
            torch.stack([part.loss for part in parts]).sum(dim=0),
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
        shares = balance(sizes, len(self.assemble().members)) if len(which) else []
        if not shares:
            return evaluation.PairCounter(
                0, self.task.info.num_classes, torch.device("cpu"), examples
            ).scores()
        questions = []
        for share in shares:
            # nobody needs the models of the others
            used, local = np.unique(which[share], return_inverse=True)
            questions.append(
                (self.shelf.pick(models, used), local, owners[share], split, time_step, examples)
            )
        return join_pairs(self._ask("score_pairs", questions), shares)

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        crew, many, rows = self.assemble(), models.num_models, ids.cpu().numpy()
        # a model or more for everybody; else all of them, and some of the rows
        by_models = many >= len(crew.members)
        shares = _split(many if by_models else len(rows), len(crew.members))
        everybody = np.arange(many)
        questions = [
            (self.shelf.pick(models, share), rows)
            if by_models
            else (self.shelf.pick(models, everybody), rows[share])
            for share in shares
        ]
        return torch.cat(self._ask("predict_logits", questions), dim=0 if by_models else 1).to(
            self.task.info.device
        )

    def close(self) -> None:
        if self.crew is not None:
            self.crew = self.assignment = None
            self.shelf = ModelStore(self._put)
            release_pool(self.likeness)
            disconnect()

    def assemble(self) -> ActorPool:
        """The workers; the first time they are started, or found where another engine of this
        process has the same.
        """
        if self.crew is not None:
            return self.crew
        import ray

        connect(self.address, self.workers)
        settings, threads = TorchSettings.read(), max(1, int(self.cpus))
        resource, share = ("GPU", self.gpus) if self.device == "cuda" else ("CPU", self.cpus)
        found = count_resources(resource)
        if found < share:
            disconnect()
            raise InputError(
                f"the Ray cluster has {found:g} {resource} and a worker needs {share:g}:"
                " add a node that has more, use another device,"
                f" or give a worker less (ray.{resource.lower()}s)"
            )
        count = min(self.workers or int(found / share), self.task.info.num_clients)
        actor = ray.remote(Worker).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self.likeness = (
            self.address,
            self.device,
            count,
            self.cpus,
            self.gpus,
            settings,
            self.retries,
            self.timeout,
        )
        self.crew = acquire_pool(
            self.likeness,
            lambda: ActorPool(
                lambda: actor.remote(self.device, threads, settings),
                count,
                self.retries,
                self.timeout,
            ),
        )
        self.assignment = TaskRef(
            uuid.uuid4().hex,
            ray.put(self.parcel.pickled),
            ray.put(self.parcel.examples),
            self.inner,
        )
        return self.crew

    def map_unordered(
        self, method: str, questions: Sequence[tuple[Any, ...]], likes: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """The same method of many workers, about this engine's task. -> (number of the question,
        its answer), in any order

        likes: for each question, whose it had better be; else they go round
        """
        crew, whose = self.assemble(), range(len(questions)) if likes is None else likes
        calls = [
            ActorRequest(method, (self.assignment, *question), member)
            for question, member in zip(questions, whose, strict=True)
        ]
        self.traffic.count(down=tuple(questions))
        for number, answer in crew.map_unordered(calls):
            self.traffic.count(up=answer)
            yield number, answer

    def _ask(self, method: str, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All answers, in the order of the questions."""
        answers = dict(self.map_unordered(method, questions))
        return [unpack(answers[number], torch.device("cpu")) for number in range(len(questions))]

    def _put(self, packed: Any) -> Any:
        """Into the store, for all workers."""
        import ray

        self.traffic.count(down=packed)
        return ray.put(packed)


def balance(work: np.ndarray, hands: int) -> list[np.ndarray]:
    """Places 0 .. n-1 in at most `hands` slices of about equal work, the largest first: whatever is
    largest goes to whoever has least.

    >>> [places.tolist() for places in balance(np.array([1, 5, 2, 2, 1]), 2)]
    [[1, 4], [0, 2, 3]]
    """
    slices: list[list[int]] = [[] for _ in range(max(1, min(hands, len(work))))]
    loads = np.zeros(len(slices))
    for place in np.argsort(-work, kind="stable").tolist():
        least = int(np.argmin(loads))
        slices[least].append(place)
        loads[least] += max(int(work[place]), 1)  # no work at all still takes a moment
    return [
        np.sort(np.array(slices[number], dtype=np.int64))
        for number in np.argsort(-loads, kind="stable")
        if slices[number]
    ]


def join_pairs(parts: list[PairCounts], shares: list[np.ndarray]) -> PairCounts:
    """Scores of slices of pairs as scores of all of them, in their order."""
    back = torch.from_numpy(np.argsort(np.concatenate(shares), kind="stable"))
    confusion, loss = (
        torch.cat([part.confusion for part in parts])[back],
        torch.cat([part.loss for part in parts])[back],
    )
    told = [part.examples for part in parts]
    if told[0] is None:
        return PairCounts(confusion, loss)
    pair = np.concatenate(
        [share[mine.pair] for share, mine in zip(shares, told, strict=True) if mine is not None]
    )
    ids, right, margin = (
        np.concatenate([mine[column] for mine in told if mine is not None]) for column in (1, 2, 3)
    )
    order = np.lexsort((ids, pair))
    return PairCounts(
        confusion, loss, ExampleResults(pair[order], ids[order], right[order], margin[order])
    )


def _split(count: int, shares: int) -> list[np.ndarray]:
    """Neighbors stay together, nobody gets nothing."""
    return [part for part in np.array_split(np.arange(count), shares) if len(part)]


def _subset_work(work: ClientWork, places: np.ndarray) -> Any:
    """The part of a work that concerns some clients; the model and what is shared are in the
    store.
    """
    index = torch.from_numpy(places)
    facts = ClientStats(*(fact[index] for fact in work.stats))
    whole: Any = work
    return whole._replace(
        clients=work.clients[places],
        start=None,
        broadcast={},
        client_state=pytree.take(work.client_state, index),
        stats=facts,
    )
