"""How many runs share a stack, and what a person sees of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remanence.config import parse_experiment
from remanence.core.progress import NullProgress, SharedProgress
from remanence.core.safe_path import SafePath
from remanence.engines.autotune import EngineChoice
from remanence.rounds.time_limit import TimeLimit
from remanence.sweeps import scheduler
from remanence.sweeps.compatibility import batch_key
from remanence.sweeps.scheduler import QueuedRun, max_runs_per_stack

LINE: dict[str, Any] = {"round": 1, "accuracy": 0.5, "rejected": [], "abandoned": False}


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"clients.count": 20, "clients.sample": 5}, 12),  # 64 places, 5 clients a round
        ({"clients.count": 20, "clients.sample": 0.1}, 32),  # 2 clients
        ({"clients.count": 50}, 1),
        ({"clients.count": 500}, 1),
        ({"clients.count": 50, "stack_size": 150}, 3),
        ({}, 6),  # ten clients where nothing is said
    ],
)
def test_as_many_runs_as_fill_a_stack(changes: dict[str, Any], runs: int) -> None:
    assert max_runs_per_stack(parse_experiment({}, changes | {"device": "cpu"})) == runs


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"seed": 3}, True),
        ({"method": "fedprox(mu=0.5)"}, True),
        ({"local.lr": 0.5, "local.schedule": "cosine"}, True),
        ({"data.partition": "iid"}, True),
        ({"method": "fedprox(mu=0.1)+wsm"}, False),
        ({"local.optimizer": "adam"}, False),
        ({"rounds": 3}, False),
    ],
)
def test_what_is_worth_trying_together(changes: dict[str, Any], same: bool) -> None:
    base = {"method": "fedprox(mu=0.1)"}
    assert (
        batch_key(parse_experiment({}, base)) == batch_key(parse_experiment({}, base | changes))
    ) is same


def test_the_rounds_of_a_stack_count_for_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of five and three rounds at once: five rounds' time has passed, not one's."""
    rounds = iter((5, 3))

    def run_one(run: QueuedRun, choice: Any, time_limit: TimeLimit, **given: Any) -> None:
        time_limit.rounds += next(rounds)

    monkeypatch.setattr(scheduler, "_run_one", run_one)
    monkeypatch.setattr(scheduler.RunBatcher, "run", lambda _, runs: [run() for run in runs])
    config, limit = parse_experiment({}, {"device": "cpu"}), TimeLimit(60)
    choice = EngineChoice("vectorized", 1, "as asked")
    runs = [QueuedRun(SafePath(Path(str(seed))), config, str(seed)) for seed in (0, 1)]
    scheduler.run_all(runs, {"": choice}, "", progress=NullProgress(), time_limit=limit)
    assert limit.rounds == 5


def test_a_stack_computes_with_the_threads_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a comparison is resumed, where this thread has chosen no engine."""
    before, seen = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(scheduler, "_run_one", lambda *_, **__: None)
    monkeypatch.setattr(
        scheduler.RunBatcher, "run", lambda _, runs: seen.append(torch.get_num_threads()) or []
    )
    config = parse_experiment({}, {"device": "cpu"})
    choice = EngineChoice("vectorized", before + 1, "as asked")
    runs = [QueuedRun(SafePath(Path(str(seed))), config, str(seed)) for seed in (0, 1)]
    limit = TimeLimit(None)
    scheduler.run_all(runs, {"": choice}, "", progress=NullProgress(), time_limit=limit)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


class Recorder:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        self.calls.append(("start", title, done, total, runs, later))

    def round(self, line: dict[str, Any]) -> None:
        self.calls.append(("round", line["round"]))

    def log(self, text: str) -> None:
        self.calls.append(("say", text))

    def prepare(self, text: str) -> None: ...
    def finish(self) -> None:
        self.calls.append("finish")


def test_the_first_run_speaks_for_all_and_the_others_only_of_trouble() -> None:
    recorder = Recorder()
    shared = SharedProgress(recorder, "three seeds", 3, 40)
    first, second = shared.for_run(), shared.for_run()
    first.start("seed 0", 0, 10)
    second.start("seed 1", 0, 10)
    first.round(LINE)
    second.round(LINE)
    second.round(
        LINE | {"round": 2, "rejected": [{"client": 4, "code": "not_finite", "reason": "NaN"}]}
    )
    second.finish()
    first.finish()
    assert recorder.calls == [
        ("start", "three seeds", 0, 10, 3, 40),
        ("round", 1),
        ("say", "seed 1: round 2, accuracy 50.0%, rejected: client 4 (not_finite)"),
        "finish",
    ]
