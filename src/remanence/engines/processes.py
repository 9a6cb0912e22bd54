"""One process a core, each with a single thread: the fastest way to train on a CPU.

Within a process clients are trained one after the other by a loop made for speed (`sequential_fast.py`)
or, where a network has no convolutions, as stacks: grouped convolutions take a CPU nearly twice as
long as plain ones, while small dense layers spend their time around the arithmetic, which a stack
shares. The workers are forked (`worker_pool.py`), so the data are shared and nothing has to be shipped
but models and states. Work goes to whoever is free, the largest first; the result of a client does
not depend on who trained it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork, ConfusionCounts, ExampleResults, PairCounts
from remanence.core.errors import InputError, RunFailed
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.engines import client_plan, evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.memory import disable_malloc_trim
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.stack_checks import check_stackable
from remanence.engines.vectorized import VectorizedEngine
from remanence.engines.worker_pool import WorkerPool
from remanence.training.task import TrainingTask


class ProcessEngine(BaseEngine):
    """`workers` processes; 0 means one a core. timeout: real seconds after which a worker that has
    not answered is given up on; 0: never.

    stack: the most clients a worker trains together; 0 or 1, and where there are convolutions: one
        after the other.
    steps: "eager", "captured" or "compiled", as for a stack; "auto" is eager.
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
        self.forks = WorkerPool(
            functools.partial(_serve, task, self.stack, execution), self.workers, timeout
        )

    def train(self, work: ClientWork) -> Iterator[Reply]:
        """A client whose training hangs twice is passed over, with those it is trained with:
        they did not answer in this round.
        """
        one_for_all = None if work.per_client_start else _pack(tuple(work.start))
        order = np.argsort(-client_plan.expected_steps(self.task, work), kind="stable")
        shares = balance(order, self.workers, self.stack)
        preface = ("round", one_for_all, _pack(work.broadcast))
        for _, answer in self.forks.map_unordered(
            range(len(shares)),
            lambda number: ("train", _subset_work(work, shares[number])),
            preface,
        ):
            if answer is not None:
                reply, problem = answer
                self.degraded_reasons = [problem] if problem else self.degraded_reasons
                yield Reply(*_unpack(reply))

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        ids, groups, count = evaluation.eval_rows(self.task, split, owners, time_step)
        # nobody is asked about no rows at all
        packed, shares = _pack(tuple(models)), max(1, min(self.workers, len(ids)))
        rows, group = np.array_split(ids.numpy(), shares), np.array_split(groups.numpy(), shares)
        parts = [
            ConfusionCounts(*part)
            for part in self._map_all(
                [("score", packed, split, *some, count) for some in zip(rows, group, strict=True)]
            )
        ]
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
        shares = [
            share for share in np.array_split(np.arange(len(which)), self.workers) if len(share)
        ]
        if not shares:
            return evaluation.PairCounter(
                0, self.task.info.num_classes, self.task.info.device, examples
            ).scores()
        questions = []
        for share in shares:
            # nobody needs the models of the others
            used, local = np.unique(which[share], return_inverse=True)
            some = _pack(tuple(models.select(torch.from_numpy(used))))
            questions.append(("pairs", some, local, owners[share], split, time_step, examples))
        parts = self._map_all(questions)
        confusion, loss = (torch.cat([part[column] for part in parts]) for column in (0, 1))
        if not examples:
            return PairCounts(confusion, loss)
        columns = [part[2] for part in parts]
        pair = np.concatenate([share[mine[0]] for share, mine in zip(shares, columns, strict=True)])
        rest = (np.concatenate([mine[place] for mine in columns]) for place in (1, 2, 3))
        return PairCounts(confusion, loss, ExampleResults(pair, *rest))

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        many, rows = models.num_models, ids.numpy()
        # a model or more for everybody; else all of them, and some of the rows
        by_models = many >= self.workers
        shares = [
            share
            for share in np.array_split(np.arange(many) if by_models else rows, self.workers)
            if len(share)
        ]
        if by_models:
            questions = [
                ("predict_logits", _pack(tuple(models.select(torch.from_numpy(share)))), rows)
                for share in shares
            ]
        else:
            questions = [("predict_logits", _pack(tuple(models)), share) for share in shares]
        return torch.cat([said for (said,) in self._map_all(questions)], dim=0 if by_models else 1)

    def close(self) -> None:
        self.forks.close()

    def _map_all(self, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All answers, in the order of the questions."""
        answers = dict(
            self.forks.map_unordered(range(len(questions)), lambda number: questions[number])
        )
        if None in answers.values():
            raise RunFailed(
                f"an evaluation did not end within {self.forks.timeout:g} s, and not when"
                " it was tried again: nothing is lost, go on with"
                " remanence resume, with a larger timeout if the work is only slow"
            )
        return [_unpack(answers[number]) for number in range(len(questions))]


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
    """The cores this process may use, where the system tells; all there are, where it does not
    (macOS).
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def balance(order: np.ndarray, workers: int, stack: int) -> list[np.ndarray]:
    """Places of a cohort, the largest client first, as pieces of work: single ones, or stacks that
    are as large as they may and equally so for all workers.

    Stacks are dealt there and back again, so that none gets the larger one every time.

    >>> balance(np.array([4, 0, 3, 1, 2]), workers=2, stack=8)
    [array([4, 1, 2]), array([0, 3])]
    """
    if stack <= 1:
        return [order[place : place + 1] for place in range(len(order))]
    count = min(len(order), workers * -(-len(order) // (workers * stack)))
    turn, seat = np.divmod(np.arange(len(order)), count)
    taker = np.where(turn % 2, count - 1 - seat, seat)
    return [order[taker == number] for number in range(count)]


def _serve(
    task: TrainingTask, stack: int, steps: str, pipe: Connection, inherited: list[Connection]
) -> None:
    """A worker's life. It ends when its parent closes the pipe or dies."""
    # a copy of the parent's end in a sibling would keep a pipe open after the parent is gone
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    disable_malloc_trim()
    one_by_one, start, shared = FastSequentialEngine(task, steps), None, {}
    trainer = VectorizedEngine(task, stack, steps) if stack > 1 else one_by_one
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            kind, *rest = pipe.recv()
            try:
                if kind == "round":
                    start, shared = (
                        (None if rest[0] is None else ModelState(*_unpack(rest[0]))),
                        _unpack(rest[1]),
                    )
                    continue
                if kind == "train":
                    reply = Reply.concat(list(trainer.train(_restore(rest[0], start, shared))))
                    answer: tuple[Any, ...] = (
                        tuple(reply),
                        trainer.degraded_reason or one_by_one.degraded_reason,
                    )
                elif kind == "pairs":
                    models, which, owners, split, time_step, examples = rest
                    answer = tuple(
                        one_by_one.score_pairs(
                            ModelState(*_unpack(models)), which, owners, split, time_step, examples
                        )
                    )
                elif kind == "predict_logits":
                    models, ids = rest
                    answer = (
                        one_by_one.predict_logits(
                            ModelState(*_unpack(models)), torch.from_numpy(ids)
                        ),
                    )
                else:
                    models, split, ids, groups, count = rest
                    answer = tuple(
                        one_by_one.score_rows(
                            ModelState(*_unpack(models)),
                            split,
                            torch.from_numpy(ids),
                            torch.from_numpy(groups),
                            count,
                        )
                    )
                pipe.send(("done", _pack(answer)))
            except Exception as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _subset_work(work: ClientWork, places: np.ndarray) -> Any:
    """The part of a work that concerns some clients; the model and what is shared went to every
    worker before.
    """
    here = torch.from_numpy(places)
    start = tuple(work.start.select(here)) if work.per_client_start else None
    facts = tuple(fact[here] for fact in work.stats)
    constants = (
        work.round,
        work.time_step,
        work.clients[places],
        work.per_client_start,
        work.optimizer_hparams,
        work.key,
        work.num_phases,
    )
    return constants, _pack((start, pytree.take(work.client_state, here), facts))


def _restore(message: Any, start: ModelState | None, shared: Any) -> ClientWork:
    (round_, time_step, clients, personal_start, rule, key, phases), packed = message
    own_start, own, facts = _unpack(packed)
    whole = start if own_start is None else ModelState(*own_start)
    assert whole is not None
    return ClientWork(
        round_,
        time_step,
        clients,
        whole,
        personal_start,
        shared,
        own,
        ClientStats(*facts),
        rule,
        key,
        phases,
    )


def _pack(value: Any) -> Any:
    """Tensors as numpy arrays: a pipe then carries plain bytes and no shared-memory handles."""
    if isinstance(value, Tensor):
        return _Array(value.detach().contiguous().numpy())
    if isinstance(value, dict):
        return {name: _pack(item) for name, item in value.items()}
    return tuple(_pack(item) for item in value) if isinstance(value, tuple) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, _Array):
        return torch.from_numpy(value.array)
    if isinstance(value, dict):
        return {name: _unpack(item) for name, item in value.items()}
    return tuple(_unpack(item) for item in value) if isinstance(value, tuple) else value


class _Array:
    """An array that was a tensor, told apart from those that never were."""

    def __init__(self, array: np.ndarray):
        self.array = array
