"""The engine of a run that shares a stack with others, and how requests are computed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import (
    ClientWork,
    ConfusionCounts,
    Engine,
    ExampleResults,
    PairCounts,
    Result,
)
from remanence.core.types import ModelState, Reply
from remanence.engines import evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.run_slices import RunWork
from remanence.engines.vectorized import VectorizedEngine
from remanence.training.task import TrainingTask


class Score(NamedTuple):
    """Evaluate models on a split."""

    models: ModelState
    split: str
    owners: np.ndarray | None
    time_step: int


class ScorePairs(NamedTuple):
    """Evaluate each model on the examples of one owner."""

    models: ModelState
    which: np.ndarray
    owners: np.ndarray
    split: str
    time_step: int
    examples: bool


class Callback(NamedTuple):
    """What a run's server computes with the engine.

    It may compile or capture steps, which two threads must not do at once. The whole function is
    one request, however often it calls the engine, so that the runs stay in the same round.
    """

    function: Callable[[Engine], Any]


Request = ClientWork | Score | ScorePairs | Callback


class RequestQueue(Protocol):
    """Where a proxy sends its requests: a `RunBatcher`."""

    def request(self, proxy: EngineProxy, request: Request) -> Any: ...

    def detach(self, proxy: EngineProxy) -> None: ...


class EngineProxy(BaseEngine):
    """The engine of one run: sends requests to the engine of its group, and waits.

    Its `execution` is "eager", because the run's thread must not compile; what its server compiles
    goes through `run_exclusive`.
    """

    name = "vectorized"

    def __init__(self, queue: RequestQueue, engine: VectorizedEngine, task: TrainingTask):
        super().__init__()
        self.queue, self.engine, self.task = queue, engine, task
        self.request: Request | None = None
        self.answer: Any = None

    def train(self, work: ClientWork) -> Iterator[Reply]:
        return iter(self.queue.request(self, work))

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        scores: ConfusionCounts = self.queue.request(self, Score(models, split, owners, time_step))
        return scores

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        scores: PairCounts = self.queue.request(
            self, ScorePairs(models, which, owners, split, time_step, examples)
        )
        return scores

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        return self.run_exclusive(lambda engine: engine.predict_logits(models, ids))

    def run_exclusive(self, function: Callable[[Engine], Result]) -> Result:
        answer: Result = self.queue.request(self, Callback(function))
        return answer

    @property
    def degraded_reason(self) -> str:
        return self.engine.degraded_reason

    def close(self) -> None:
        self.queue.detach(self)


def group_requests(waiting: Sequence[EngineProxy]) -> list[list[EngineProxy]]:
    """The waiting runs, in groups whose requests can be computed as one."""
    groups: list[list[EngineProxy]] = []
    for proxy in waiting:
        found = next(
            (
                group
                for group in groups
                if proxy.engine is group[0].engine and _can_join(proxy, group[0])
            ),
            None,
        )
        if found is None:
            groups.append([proxy])
        else:
            found.append(proxy)
    return groups


def _can_join(one: EngineProxy, other: EngineProxy) -> bool:
    a, b = one.request, other.request
    if isinstance(a, ClientWork) and isinstance(b, ClientWork):
        return a.num_phases == b.num_phases
    if isinstance(a, Score) and isinstance(b, Score):
        return a.split == b.split and _same_rows(_rows(one.task, a), _rows(other.task, b))
    if isinstance(a, ScorePairs) and isinstance(b, ScorePairs):
        return (a.split, a.examples) == (b.split, b.examples)
    return False


def _rows(task: TrainingTask, request: Score) -> list[np.ndarray]:
    return evaluation.eval_groups(task, request.split, request.owners, request.time_step)


def _same_rows(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


def compute(proxies: Sequence[EngineProxy]) -> list[Any]:
    """Compute the requests of a group as one. -> an answer for each run"""
    engine, requests = proxies[0].engine, [proxy.request for proxy in proxies]
    works = [request for request in requests if isinstance(request, ClientWork)]
    scores = [request for request in requests if isinstance(request, Score)]
    pairs = [request for request in requests if isinstance(request, ScorePairs)]
    callbacks = [request for request in requests if isinstance(request, Callback)]
    if works:
        return _train(
            engine, [RunWork(proxy.task, work) for proxy, work in zip(proxies, works, strict=True)]
        )
    if callbacks:
        return [callback.function(engine) for callback in callbacks]
    return (
        _score(engine, proxies[0].task, scores) if scores else _score_pairs(engine, proxies, pairs)
    )


def _train(engine: VectorizedEngine, works: Sequence[RunWork]) -> list[list[Reply]]:
    replies: list[list[Reply]] = [[] for _ in works]
    for number, reply in engine.train_runs(works):
        replies[number].append(reply)
    return replies


def _score(
    engine: VectorizedEngine, task: TrainingTask, requests: Sequence[Score]
) -> list[ConfusionCounts]:
    models, counts = _join_models([request.models for request in requests])
    whole = engine.score_groups(models, requests[0].split, _rows(task, requests[0]))
    return [
        ConfusionCounts(*parts)
        for parts in zip(
            torch.split(whole.confusion, counts), torch.split(whole.loss, counts), strict=True
        )
    ]


def _score_pairs(
    engine: VectorizedEngine, proxies: Sequence[EngineProxy], requests: Sequence[ScorePairs]
) -> list[PairCounts]:
    models, counts = _join_models([request.models for request in requests])
    first = np.cumsum([0, *counts[:-1]])
    which = np.concatenate(
        [request.which + offset for request, offset in zip(requests, first, strict=True)]
    )
    rows = []
    for proxy, request in zip(proxies, requests, strict=True):
        held = evaluation.split_rows(proxy.task, request.split, request.time_step)
        rows += [held.for_client(int(owner)) for owner in request.owners]
    whole = engine.score_on_rows(models, which, rows, requests[0].split, requests[0].examples)
    ends = np.cumsum([len(request.which) for request in requests])
    return [
        _cut(whole, int(end) - len(request.which), int(end))
        for request, end in zip(requests, ends, strict=True)
    ]


def _cut(whole: PairCounts, first: int, end: int) -> PairCounts:
    """Some of the pairs, counted from 0 again."""
    examples = whole.examples
    if examples is not None:
        here = (examples.pair >= first) & (examples.pair < end)
        examples = ExampleResults(
            examples.pair[here] - first,
            examples.ids[here],
            examples.correct[here],
            examples.margin[here],
        )
    return PairCounts(whole.confusion[first:end], whole.loss[first:end], examples)


def _join_models(models: Sequence[ModelState]) -> tuple[ModelState, list[int]]:
    """Stacks of models as one, and how many each of them had."""
    counts = [stack.num_models for stack in models]
    return ModelState(
        pytree.concatenate([stack.params for stack in models]),
        pytree.concatenate([stack.buffers for stack in models]),
    ), counts
