"""What a worker process of the engine `processes` does, and how its messages are packed."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import ClientWork
from remanence.core.types import ClientStats, ModelState, Reply
from remanence.engines.memory import disable_malloc_trim
from remanence.engines.sequential_fast import FastSequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.training.task import TrainingTask


def serve(
    task: TrainingTask, stack: int, execution: str, pipe: Connection, inherited: list[Connection]
) -> None:
    """Answer requests until the parent closes the pipe or dies.

    Args:
        task: What is trained.
        stack: The most clients trained together.
        execution: How steps run.
        pipe: The worker's end.
        inherited: Ends that the fork copied and the worker closes.
    """
    # a copy of the parent's end in another worker would keep a pipe open after the parent has ended
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    disable_malloc_trim()
    worker = _Worker(task, stack, execution)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            kind, *arguments = pipe.recv()
            try:
                if kind == "round":
                    worker.set_round(*arguments)
                    continue
                pipe.send(("done", pack(worker.answer(kind, arguments))))
            except Exception as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class _Worker:
    """Answers each kind of request; "round" precedes training and has no answer."""

    def __init__(self, task: TrainingTask, stack: int, execution: str):
        self.evaluator = FastSequentialEngine(task, execution)
        self.trainer: FastSequentialEngine | VectorizedEngine = (
            VectorizedEngine(task, stack, execution) if stack > 1 else self.evaluator
        )
        self.start: ModelState | None = None
        self.broadcast: Any = {}

    def set_round(self, start: Any, broadcast: Any) -> None:
        """The model, unless each client has its own, and what the server broadcasts."""
        self.start = None if start is None else ModelState(*unpack(start))
        self.broadcast = unpack(broadcast)

    def answer(self, kind: str, arguments: list[Any]) -> tuple[Any, ...]:
        requests: dict[str, Callable[..., tuple[Any, ...]]] = {
            "train": self.train,
            "score": self.score,
            "pairs": self.score_pairs,
            "predict_logits": self.predict_logits,
        }
        return requests[kind](*arguments)

    def train(self, message: Any) -> tuple[Any, ...]:
        work = unpack_work(message, self.start, self.broadcast)
        reply = Reply.concat(list(self.trainer.train(work)))
        reasons = (*self.trainer.degraded_reasons, *self.evaluator.degraded_reasons)
        return tuple(reply), reasons

    def score_pairs(
        self,
        models: Any,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
        examples: bool,
    ) -> tuple[Any, ...]:
        stack = ModelState(*unpack(models))
        return tuple(self.evaluator.score_pairs(stack, which, owners, split, time_step, examples))

    def predict_logits(self, models: Any, ids: np.ndarray) -> tuple[Any, ...]:
        stack = ModelState(*unpack(models))
        return (self.evaluator.predict_logits(stack, torch.from_numpy(ids)),)

    def score(
        self, models: Any, split: str, ids: np.ndarray, groups: np.ndarray, count: int
    ) -> tuple[Any, ...]:
        stack = ModelState(*unpack(models))
        return tuple(
            self.evaluator.score_rows(
                stack, split, torch.from_numpy(ids), torch.from_numpy(groups), count
            )
        )


def pack_work(work: ClientWork, indices: np.ndarray) -> Any:
    """The work of some clients; the model and the broadcast went to every worker before."""
    index = torch.from_numpy(indices)
    start = tuple(work.start.select(index)) if work.per_client_start else None
    stats = tuple(value[index] for value in work.stats)
    constants = (
        work.round,
        work.time_step,
        work.clients[indices],
        work.per_client_start,
        work.optimizer_hparams,
        work.key,
        work.num_phases,
    )
    return constants, pack((start, pytree.take(work.client_state, index), stats))


def unpack_work(message: Any, start: ModelState | None, broadcast: Any) -> ClientWork:
    """The inverse of `pack_work`."""
    (round_, time_step, clients, per_client_start, hparams, key, num_phases), packed = message
    client_starts, client_state, stats = unpack(packed)
    model = start if client_starts is None else ModelState(*client_starts)
    assert model is not None
    return ClientWork(
        round_,
        time_step,
        clients,
        model,
        per_client_start,
        broadcast,
        client_state,
        ClientStats(*stats),
        hparams,
        key,
        num_phases,
    )


def pack(value: Any) -> Any:
    """Tensors as numpy arrays: a pipe then sends plain bytes instead of shared-memory handles."""
    if isinstance(value, Tensor):
        return _PackedArray(value.detach().contiguous().numpy())
    if isinstance(value, dict):
        return {name: pack(item) for name, item in value.items()}
    return tuple(pack(item) for item in value) if isinstance(value, tuple) else value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, _PackedArray):
        return torch.from_numpy(value.array)
    if isinstance(value, dict):
        return {name: unpack(item) for name, item in value.items()}
    return tuple(unpack(item) for item in value) if isinstance(value, tuple) else value


class _PackedArray:
    """An array that was a tensor, as opposed to one that was an array before."""

    def __init__(self, array: np.ndarray):
        self.array = array
