"""Several runs that train in one stack: seeds and numeric hyper-parameters of one method.

Every run goes its own way in a thread of its own, with a `EngineProxy` for an engine. Where it needs an
engine it waits; when all runs wait, what they ask for is computed together where it is alike, else
in turn, and everyone goes on. No run can tell that it is not alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
from remanence.core.errors import Stopped
from remanence.core.signals import sigterm_as_interrupt
from remanence.core.types import ModelState, Reply
from remanence.engines import evaluation
from remanence.engines.base import BaseEngine
from remanence.engines.run_slices import RunWork
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.sweeps.compatibility import can_batch
from remanence.training.task import TrainingTask


class Score(NamedTuple):
    """Models on a split."""

    models: ModelState
    split: str
    owners: np.ndarray | None
    time_step: int


class ScorePairs(NamedTuple):
    """Models on rows of their own."""

    models: ModelState
    which: np.ndarray
    owners: np.ndarray
    split: str
    time_step: int
    examples: bool


class Callback(NamedTuple):
    """What a run's server does with the engine. It may compile or record steps, which no two
    threads can do at once, and takes as long as it takes: so that the runs stay in step, it is one
    request, whatever the server asks the engine meanwhile.
    """

    function: Callable[[Engine], Any]


Request = ClientWork | Score | ScorePairs | Callback


class EngineGroup(NamedTuple):
    """Runs whose work is alike sit at one table: the engine is that of the first of them."""

    lead: BuiltExperiment
    engine: VectorizedEngine


class EngineProxy(BaseEngine):
    """The engine of one run: asks the meeting, and waits."""

    name = "vectorized"

    def __init__(self, meeting: RunBatcher, table: EngineGroup, task: TrainingTask):
        super().__init__()
        self.meeting, self.table, self.task = meeting, table, task
        self.request: Request | None = None
        self.answer: Any = None

    def train(self, work: ClientWork) -> Iterator[Reply]:
        return iter(self.meeting.request(self, work))

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        scores: ConfusionCounts = self.meeting.request(
            self, Score(models, split, owners, time_step)
        )
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
        scores: PairCounts = self.meeting.request(
            self, ScorePairs(models, which, owners, split, time_step, examples)
        )
        return scores

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        said: Tensor = self.run_exclusive(lambda engine: engine.predict_logits(models, ids))
        return said

    def run_exclusive(self, function: Callable[[Engine], Result]) -> Result:
        answer: Result = self.meeting.request(self, Callback(function))
        return answer

    @property
    def degraded_reason(self) -> str:
        return self.table.engine.degraded_reason

    def close(self) -> None:
        self.meeting.detach(self)


class RunBatcher:
    """Where runs come together. `make` builds the engine of a table."""

    def __init__(self, make: Callable[[BuiltExperiment], VectorizedEngine]):
        self.make = make
        self.change = threading.Condition()
        self.groups: list[EngineGroup] = []
        self.seats: list[EngineProxy] = []
        self.running = 0  # threads that have not ended
        self.stop: BaseException | None = None

    def run(self, runs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all of them; each takes its engine from `sit`. -> what they return, or the
        exceptions that ended them
        """
        results: list[Any] = [None] * len(runs)
        self.running = len(runs)

        def go(place: int) -> None:
            try:
                results[place] = runs[place]()
            except BaseException as error:  # handed to the caller, who knows what it means
                results[place] = error
            with self.change:
                self.running -= 1
                if (
                    isinstance(results[place], BaseException)
                    and not isinstance(results[place], Stopped)
                    and self.stop is None
                ):
                    # one has failed: the others save what they have
                    self.stop = KeyboardInterrupt()
                self.change.notify_all()

        with sigterm_as_interrupt():
            for place in range(len(runs)):
                threading.Thread(target=go, args=(place,), daemon=True).start()
            while self.running:
                try:
                    self._serve()
                # every run hears of it where it waits, saves and ends
                except KeyboardInterrupt as stop:
                    with self.change:
                        self.stop = stop
                        self.change.notify_all()
        for table in self.groups:
            table.engine.close()
        return results

    def attach(self, experiment: BuiltExperiment) -> EngineProxy:
        """A place for a run that is about to begin."""
        with self.change:
            table = next(
                (known for known in self.groups if can_batch(known.lead, experiment)), None
            )
            if table is None:
                table = EngineGroup(experiment, self.make(experiment))
                self.groups.append(table)
            seat = EngineProxy(self, table, experiment.task)
            self.seats.append(seat)
        return seat

    def detach(self, seat: EngineProxy) -> None:
        with self.change:
            self.seats.remove(seat)
            self.change.notify_all()

    def request(self, seat: EngineProxy, request: Request) -> Any:
        """Called by a run's thread; returns when its request was computed."""
        with self.change:
            seat.request = request
            self.change.notify_all()
            self.change.wait_for(lambda: seat.request is None or self.stop is not None)
            if seat.request is not None and self.stop is not None:
                seat.request = None
                raise type(self.stop)
        if isinstance(seat.answer, BaseException):
            raise seat.answer
        return seat.answer

    def _serve(self) -> None:
        """Wait until every run waits, and answer all of them."""
        with self.change:
            self.change.wait_for(self._all_wait)
            waiting = [seat for seat in self.seats if seat.request is not None]
        for seats in group_requests(waiting):
            try:
                answers = compute(seats)
            except Exception as error:  # each run meets it as if it had been alone
                answers = [error] * len(seats)
            for seat, answer in zip(seats, answers, strict=True):
                seat.answer = answer
        with self.change:
            for seat in waiting:
                seat.request = None
            self.change.notify_all()

    def _all_wait(self) -> bool:
        """Does every run that has not ended wait for an answer? Once they were told to stop,
        none does.
        """
        return (
            sum(seat.request is not None for seat in self.seats) == self.running
            if self.stop is None
            else self.running == 0
        )


def group_requests(waiting: Sequence[EngineProxy]) -> list[list[EngineProxy]]:
    """Those whose requests can be computed as one."""
    groups: list[list[EngineProxy]] = []
    for seat in waiting:
        found = next(
            (
                group
                for group in groups
                if seat.table is group[0].table and _can_join(seat, group[0])
            ),
            None,
        )
        if found is None:
            groups.append([seat])
        else:
            found.append(seat)
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


def compute(seats: Sequence[EngineProxy]) -> list[Any]:
    """What these runs asked for, as one. -> an answer for each"""
    engine, requests = seats[0].table.engine, [seat.request for seat in seats]
    works = [request for request in requests if isinstance(request, ClientWork)]
    scores = [request for request in requests if isinstance(request, Score)]
    pairs = [request for request in requests if isinstance(request, ScorePairs)]
    errands = [request for request in requests if isinstance(request, Callback)]
    if works:
        return _train(
            engine, [RunWork(seat.task, work) for seat, work in zip(seats, works, strict=True)]
        )
    if errands:
        return [errand.function(engine) for errand in errands]
    return _score(engine, seats[0].task, scores) if scores else _score_pairs(engine, seats, pairs)


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
    engine: VectorizedEngine, seats: Sequence[EngineProxy], requests: Sequence[ScorePairs]
) -> list[PairCounts]:
    models, counts = _join_models([request.models for request in requests])
    first = np.cumsum([0, *counts[:-1]])
    which = np.concatenate(
        [request.which + offset for request, offset in zip(requests, first, strict=True)]
    )
    rows = []
    for seat, request in zip(seats, requests, strict=True):
        held = evaluation.split_rows(seat.task, request.split, request.time_step)
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
