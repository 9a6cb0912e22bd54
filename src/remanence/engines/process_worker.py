"""What a worker process of the engine `processes` does."""

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

from remanence.core import preparation
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.types import ModelState, Reply
from remanence.engines.memory import disable_malloc_trim
from remanence.engines.packing import pack, unpack
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
    preparation.remove_listeners()  # the parent's
    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
        preparation.listening(lambda text: pipe.send(("preparing", text))),
    ):
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
        self.start = unpack(start)
        self.broadcast = unpack(broadcast)

    def answer(self, kind: str, arguments: list[Any]) -> Any:
        requests: dict[str, Callable[..., Any]] = {
            "train": self.train,
            "score": self.score,
            "pairs": self.score_pairs,
            "predict_logits": self.predict_logits,
        }
        return requests[kind](*arguments)

    def train(self, packed: Any) -> tuple[Reply, tuple[str, ...]]:
        work: ClientWork = unpack(packed)._replace(broadcast=self.broadcast)
        if not work.per_client_start:
            assert self.start is not None
            work = work._replace(start=self.start)
        reply = Reply.concat(list(self.trainer.train(work)))
        return reply, (*self.trainer.degraded_reasons, *self.evaluator.degraded_reasons)

    def score_pairs(
        self,
        models: Any,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int,
        examples: bool,
    ) -> PairCounts:
        return self.evaluator.score_pairs(unpack(models), which, owners, split, time_step, examples)

    def predict_logits(self, models: Any, ids: np.ndarray) -> Tensor:
        return self.evaluator.predict_logits(unpack(models), torch.from_numpy(ids))

    def score(
        self, models: Any, split: str, ids: np.ndarray, groups: np.ndarray, count: int
    ) -> ConfusionCounts:
        return self.evaluator.score_rows(
            unpack(models), split, torch.from_numpy(ids), torch.from_numpy(groups), count
        )
