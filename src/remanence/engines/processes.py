"""The engine `processes`: one process for each core, each with a single thread.

On a CPU with several cores it is usually the fastest engine. Within a process clients are trained
one after the other (`sequential_fast.py`) or, where a network has no convolutions, as stacks:
grouped convolutions take a CPU nearly twice as long as plain ones, while most of the time of small
dense layers is overhead that a stack shares. Workers are forked (`worker_pool.py`), so they share
the data, and only models and states are sent. A free worker takes the largest client that waits; a
client's result does not depend on which worker trains it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.errors import InputError, RunFailed
from remanence.core.types import ModelState, Reply
from remanence.engines import client_plan, evaluation, process_worker
from remanence.engines.base import BaseEngine
from remanence.engines.packing import pack, unpack
from remanence.engines.stack_checks import check_stackable
from remanence.engines.worker_pool import WorkerPool
from remanence.training.task import TrainingTask


class ProcessEngine(BaseEngine):
    """Trains and evaluates in worker processes.

    Args:
        task: What is trained.
        workers: Processes; 0: one for each core.
        timeout: Seconds after which a worker that has not answered is replaced; 0: never.
        stack: The most clients a worker trains together; 0 or 1, and where there are convolutions:
            one after the other.
        execution: "eager", "captured" or "compiled", as in `VectorizedEngine`; "auto" is eager.
    """

    name = "processes"

    def __init__(
        self,
        task: TrainingTask,
        workers: int = 0,
        timeout: float = 1800.0,
        stack: int = 0,
        execution: str = "auto",
    ):
        super().__init__()
        check_processes(task, stack)
        self.task, self.stack, self.execution = task, worker_stack(task, stack), execution
        self.workers = workers or count_cores()
        serve = functools.partial(process_worker.serve, task, self.stack, execution)
        self.pool = WorkerPool(serve, self.workers, timeout)

    def train(self, work: ClientWork) -> Iterator[Reply]:
        """Train the clients; one that hangs twice, and those trained with it, drop out."""
        start = None if work.per_client_start else work.start
        rest = work._replace(broadcast={}) if work.per_client_start else work.without_model()
        order = np.argsort(-client_plan.expected_steps(self.task, work), kind="stable")
        parts = balance(order, self.workers, self.stack)
        broadcast = ("round", pack(start), pack(work.broadcast))
        for _, answer in self.pool.map_unordered(
            range(len(parts)),
            lambda number: ("train", pack(rest.select(torch.from_numpy(parts[number])))),
            broadcast,
        ):
            if answer is not None:
                reply, reasons = answer
                self.add_degraded_reasons(reasons)
                yield unpack(reply)

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        ids, groups, count = evaluation.eval_rows(self.task, split, owners, time_step)
        packed, parts = pack(models), max(1, min(self.workers, len(ids)))
        rows, group = np.array_split(ids.numpy(), parts), np.array_split(groups.numpy(), parts)
        counts: list[ConfusionCounts] = self._map_all(
            [("score", packed, split, *some, count) for some in zip(rows, group, strict=True)]
        )
        return ConfusionCounts(
            torch.stack([part.confusion for part in counts]).sum(dim=0),
            torch.stack([part.loss for part in counts]).sum(dim=0),
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
        parts = evaluation.split_evenly(len(which), self.workers)
        if not parts:
            return evaluation.PairCounter(
                0, self.task.info.num_classes, self.task.info.device, examples
            ).scores()
        requests = []
        for part in parts:
            # a worker gets only the models that it evaluates
            used, local = np.unique(which[part], return_inverse=True)
            some = pack(models.select(torch.from_numpy(used)))
            requests.append(("pairs", some, local, owners[part], split, time_step, examples))
        return evaluation.join_pairs(self._map_all(requests), parts)

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        count, rows = models.num_models, ids.numpy()
        # a model or more for each worker; else all models, and some of the examples
        by_models = count >= self.workers
        parts = evaluation.split_evenly(count if by_models else len(rows), self.workers)
        if by_models:
            requests = [
                ("predict_logits", pack(models.select(torch.from_numpy(part))), rows)
                for part in parts
            ]
        else:
            packed = pack(models)
            requests = [("predict_logits", packed, rows[part]) for part in parts]
        return torch.cat(self._map_all(requests), dim=0 if by_models else 1)

    def close(self) -> None:
        self.pool.close()

    def _map_all(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All answers, in the order of the requests."""
        answers = dict(
            self.pool.map_unordered(range(len(requests)), lambda number: requests[number])
        )
        if None in answers.values():
            raise RunFailed(
                f"an evaluation did not end within {self.pool.timeout:g} s, and not when"
                " it was tried again: nothing is lost, go on with"
                " remanence resume, with a larger timeout if the work is only slow"
            )
        return [unpack(answers[number]) for number in range(len(requests))]


def check_processes(task: TrainingTask, stack: int) -> None:
    """Raise `InputError` where worker processes could not run a task."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError(
            "engine processes needs a system that can fork (Linux or macOS): use"
            " engine=sequential here"
        )
    if task.info.device.type != "cpu":
        raise InputError(
            f"engine processes is for the CPU, not {task.info.device}: use engine=vectorized"
        )
    if worker_stack(task, stack) > 1:
        check_stackable(task)


def worker_stack(task: TrainingTask, stack: int) -> int:
    """The most clients that a worker trains together: one where there are convolutions."""
    return 1 if task.model.has_convolutions else stack


def count_cores() -> int:
    """The cores this process may use or, where the system does not know (macOS), all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def balance(order: np.ndarray, workers: int, stack: int) -> list[np.ndarray]:
    """Divide a cohort among workers: single clients, or stacks that are as large as allowed and
    equal in size.

    Stacks are filled forward and backward in turn, so that none gets the larger client every time.

    Args:
        order: Indices into the cohort, the largest client first.
        workers: Processes.
        stack: The most clients of a stack.

    >>> balance(np.array([4, 0, 3, 1, 2]), workers=2, stack=8)
    [array([4, 1, 2]), array([0, 3])]
    """
    if stack <= 1:
        return [order[place : place + 1] for place in range(len(order))]
    count = min(len(order), workers * -(-len(order) // (workers * stack)))
    turn, column = np.divmod(np.arange(len(order)), count)
    owner = np.where(turn % 2, count - 1 - column, column)
    return [order[owner == number] for number in range(count)]
