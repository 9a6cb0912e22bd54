"""One process a core, each a `loop` with a single thread and images laid out channels-last: the fastest way to train convolution nets on a CPU.

The workers are forked, so the data are shared and nothing has to be shipped but models and states. Clients go to whoever is free, the largest first; the
result of a client does not depend on who trained it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from remanence import trees
from remanence.engines import common
from remanence.engines.loop import Loop
from remanence.errors import InputError, RunFailed
from remanence.local import Task
from remanence.types import Facts, Job, PairScores, Reply, Scores, Start, Verdicts


class Processes:
    """`workers` processes; 0 means one a core."""

    name = "processes"

    def __init__(self, task: Task, workers: int = 0):
        self.task = task
        self.workers = workers or count_cores()
        if "fork" not in multiprocessing.get_all_start_methods():
            raise InputError("engine processes needs a system that can fork (Linux or macOS): use engine=loop here")
        if task.world.device.type != "cpu":
            raise InputError(f"engine processes is for the CPU, not {task.world.device}: use engine=stacked")
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.children = []
        for _ in range(self.workers):
            mine, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(task, theirs, [*self.pipes, mine]), daemon=True)
            child.start()
            theirs.close()
            self.pipes.append(mine)
            self.children.append(child)

    def train(self, job: Job) -> Iterator[Reply]:
        one_for_all = None if job.personal_start else _pack(tuple(job.start))
        for pipe in self.pipes:
            self._send(pipe, ("round", one_for_all, _pack(job.shared)))
        waiting = list(np.argsort(-common.expected_steps(self.task, job), kind="stable"))
        busy: set[Connection] = set()
        for pipe in self.pipes:
            if waiting:
                self._send(pipe, ("train", _one_client(job, int(waiting.pop(0)))))
                busy.add(pipe)
        while busy:
            for ready in multiprocessing.connection.wait(list(busy)):
                pipe = cast(Connection, ready)
                reply = Reply(*_unpack(self._receive(pipe)))
                if waiting:
                    self._send(pipe, ("train", _one_client(job, int(waiting.pop(0)))))
                else:
                    busy.remove(pipe)
                yield reply

    def score(self, models: Start, split: str, owners: np.ndarray | None = None, time_step: int = 0) -> Scores:
        ids, groups, count = common.rows_to_score(self.task, split, owners, time_step)
        packed = _pack(tuple(models))
        helpers = self.pipes[: max(1, min(self.workers, len(ids)))]  # nobody is asked about no rows at all
        shares = zip(np.array_split(ids.numpy(), len(helpers)), np.array_split(groups.numpy(), len(helpers)), strict=True)
        for pipe, (some, theirs) in zip(helpers, shares, strict=True):
            self._send(pipe, ("score", packed, split, some, theirs, count))
        parts = [Scores(*_unpack(self._receive(pipe))) for pipe in helpers]
        return Scores(torch.stack([part.confusion for part in parts]).sum(dim=0), torch.stack([part.loss for part in parts]).sum(dim=0))

    def score_pairs(
        self, models: Start, which: np.ndarray, owners: np.ndarray, split: str, time_step: int = 0, verdicts: bool = False
    ) -> PairScores:
        shares = [share for share in np.array_split(np.arange(len(which)), self.workers) if len(share)]
        if not shares:
            return common.PairTally(0, self.task.world.classes, self.task.world.device, verdicts).scores()
        for pipe, share in zip(self.pipes, shares, strict=False):
            used, local = np.unique(which[share], return_inverse=True)  # nobody needs the models of the others
            some = _pack(tuple(models.take(torch.from_numpy(used))))
            self._send(pipe, ("pairs", some, local, owners[share], split, time_step, verdicts))
        parts = [_unpack(self._receive(pipe)) for pipe, _ in zip(self.pipes, shares, strict=False)]
        confusion, loss = (torch.cat([part[column] for part in parts]) for column in (0, 1))
        if not verdicts:
            return PairScores(confusion, loss)
        columns = [part[2] for part in parts]
        pair = np.concatenate([share[mine[0]] for share, mine in zip(shares, columns, strict=True)])
        rest = (np.concatenate([mine[place] for mine in columns]) for place in (1, 2, 3))
        return PairScores(confusion, loss, Verdicts(pair, *rest))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for child in self.children:
            child.terminate()
            child.join()

    def _send(self, pipe: Connection, message: tuple[Any, ...]) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def _receive(self, pipe: Connection) -> Any:
        try:
            kind, answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if kind == "failed":
            raise RunFailed(f"a worker process failed: {answer}")
        return answer

    def _death(self) -> RunFailed:
        return RunFailed(
            "a worker process died (out of memory, or killed): nothing is lost, go on with remanence resume, with fewer workers if it happens again"
        )


def count_cores() -> int:
    """The cores this process may use, where the system tells; all there are, where it does not (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(task: Task, pipe: Connection, inherited: list[Connection]) -> None:
    """A worker's life. It ends when its parent closes the pipe or dies."""
    for other in inherited:  # a copy of the parent's end in a sibling would keep a pipe open after the parent is gone
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    engine, start, shared = Loop(task, channels_last=True), None, {}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            kind, *rest = pipe.recv()
            try:
                if kind == "round":
                    start, shared = (None if rest[0] is None else Start(*_unpack(rest[0]))), _unpack(rest[1])
                    continue
                if kind == "train":
                    answer = tuple(engine.train_client(_restore(rest[0], start, shared), 0))
                elif kind == "pairs":
                    models, which, owners, split, time_step, verdicts = rest
                    answer = tuple(engine.score_pairs(Start(*_unpack(models)), which, owners, split, time_step, verdicts))
                else:
                    models, split, ids, groups, count = rest
                    answer = tuple(
                        engine.score_rows(Start(*_unpack(models)), split, torch.from_numpy(ids), torch.from_numpy(groups), count)
                    )
                pipe.send(("done", _pack(answer)))
            except Exception as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _one_client(job: Job, place: int) -> Any:
    """The part of a job that concerns one client; the model and what is shared went to every worker before."""
    here = slice(place, place + 1)
    start = tuple(trees.take(tree, here) for tree in job.start) if job.personal_start else None
    facts = tuple(fact[here] for fact in job.facts)
    constants = (job.round, job.time_step, job.clients[here], job.personal_start, job.rule, job.key, job.phases)
    return constants, _pack((start, trees.take(job.own, here), facts))


def _restore(message: Any, start: Start | None, shared: Any) -> Job:
    (round_, time_step, clients, personal_start, rule, key, phases), packed = message
    own_start, own, facts = _unpack(packed)
    whole = start if own_start is None else Start(*own_start)
    assert whole is not None
    return Job(round_, time_step, clients, whole, personal_start, shared, own, Facts(*facts), rule, key, phases)


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
