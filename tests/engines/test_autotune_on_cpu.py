"""Which engine `auto` takes on a CPU, and how it runs: measured, and only as far as the run is
long enough to gain by it.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from remanence.core.engine import Engine
from remanence.core.progress import NullProgress
from remanence.engines import autotune
from remanence.engines.autotune import EngineChoice, choose_engine
from remanence.engines.cost import Workload
from remanence.engines.processes import ProcessEngine
from remanence.engines.table import make_engine
from remanence.rounds.engine_choice import resolve_engine
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment

IMAGES = {
    "data.name": "synthetic(samples=64, classes=4, shape='1x16x16', test=0.25)",
    "model": "lenet",
    "data.partition": "iid",
}
Times = dict[tuple[str, int, str], float]


def kind(engine: Engine) -> tuple[str, int, str]:
    """Name, stack (0: the engine has none) and execution."""
    return engine.name, getattr(engine, "stack", 0), engine.execution


def choose_with(
    monkeypatch: pytest.MonkeyPatch,
    times: Times,
    workload: Workload,
    cores: int = 2,
    starts: Times | None = None,
    **changes: Any,
) -> tuple[EngineChoice, list[tuple[str, int, str]]]:
    """times: seconds that a trial takes; starts: seconds that its start takes -> the choice, and
    what was tried for it
    """
    tried: list[tuple[str, int, str]] = []

    def measure(make: Any, job: Any, clock: Any, count: int) -> tuple[float, float]:
        with closing(make()) as engine:
            tried.append(kind(engine))
        seconds = times[tried[-1]]
        return seconds + (starts or {}).get(tried[-1], 0.0), seconds

    monkeypatch.setattr(autotune, "measure", measure)
    monkeypatch.setattr(autotune, "count_cores", lambda: cores)
    experiment = small_experiment("fedavg", IMAGES | {"clients.sample": 4} | changes)
    work = make_work(experiment, first_state(experiment), 1)
    # the first is for the threads
    return choose_engine(experiment.task, work, workload=workload), tried[1:]


# four clients (two where they are trained one after the other) make 3 steps each in a trial, and 8
# in one of steps traced or compiled: 12 (6) and 32 local steps
SLOW_LOOP: Times = {
    ("sequential", 0, "eager"): 0.06,  # 10 ms a step
    ("vectorized", 64, "eager"): 0.24,  # 20 ms: not hopeless if it were below twice the best
    ("processes", 1, "eager"): 0.06,  # 5 ms
    ("processes", 16, "eager"): 0.084,  # 7 ms
    ("processes", 1, "captured"): 0.128,  # 4 ms
    ("processes", 16, "captured"): 0.096,  # 3 ms
    ("processes", 1, "compiled"): 0.032,  # 1 ms
    ("processes", 16, "compiled"): 0.064,  # 2 ms
}


def test_a_short_run_takes_what_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, tried = choose_with(monkeypatch, SLOW_LOOP, workload=Workload(1))
    assert tried == [("sequential", 0, "eager"), ("processes", 1, "eager")]
    assert choice[:1] + choice[3:5] == ("processes", "eager", 1)
    assert choice.reason == "processes: 5.00 ms per local step (sequential: 10.00 ms)"


def test_what_is_hardly_faster_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.9 ms against 5.0 may be chance."""
    choice, _ = choose_with(
        monkeypatch, SLOW_LOOP | {("processes", 1, "captured"): 0.1568}, workload=Workload(2_000)
    )
    assert choice[:1] + choice[3:5] == ("processes", "eager", 1)


def test_a_longer_run_writes_steps_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients make two steps each a round: 2,000 rounds at 5 ms are 80 s, too few for
    compiling.
    """
    choice, tried = choose_with(monkeypatch, SLOW_LOOP, workload=Workload(2_000))
    assert tried[2:] == [("processes", 1, "captured")]
    assert choice[:1] + choice[3:5] == ("processes", "captured", 1)
    reason = "processes captured: 4.00 ms per local step (sequential: 10.00 ms, processes: 5.00 ms)"
    assert choice.reason == reason


def test_workers_stack_networks_without_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those: one client after the other is for convolutions."""
    choice, tried = choose_with(
        monkeypatch, SLOW_LOOP, workload=Workload(2_000), model="mlp(hidden=4)"
    )
    assert tried == [
        ("sequential", 0, "eager"),
        ("vectorized", 64, "eager"),
        ("processes", 16, "captured"),
    ]
    assert choice[:1] + choice[3:5] == ("processes", "captured", 16)
    assert choice.reason == (
        "processes in stacks captured: 3.00 ms per local step (sequential: 10.00 ms,"
        " vectorized: 20.00 ms)"
    )


def test_all_runs_of_a_command_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling pays for five seeds together, but not for five methods, which are compiled each."""
    for workload, expected in (
        (Workload(2_000), "captured"),
        (Workload(12_000, runs=5), "compiled"),
        (Workload(12_000, runs=5, methods=5), "captured"),
    ):
        choice, _ = choose_with(monkeypatch, SLOW_LOOP, workload=workload)
        assert choice.execution == expected
    assert choice.expected_s == pytest.approx(12_000 * 8 * 0.004)


def test_a_start_that_takes_long_must_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need a second to start: ten rounds at 10 ms a step are over before that, a hundred
    rounds are not. The start of compiled steps counts for each further method.
    """
    starts = {("processes", 1, "eager"): 1.0, ("processes", 1, "compiled"): 400.0}
    for rounds, expected in ((10, "sequential"), (100, "processes")):
        choice, _ = choose_with(monkeypatch, SLOW_LOOP, Workload(rounds), starts=starts)
        assert choice.name == expected
    for methods, expected in ((1, "compiled"), (5, "captured")):
        choice, tried = choose_with(
            monkeypatch, SLOW_LOOP, Workload(40_000, 5, methods), starts=starts
        )
        assert ("processes", 1, "compiled") in tried
        assert choice.execution == expected


def test_a_long_run_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, tried = choose_with(monkeypatch, SLOW_LOOP, workload=Workload(100_000))
    assert tried[-2:] == [("processes", 1, "captured"), ("processes", 1, "compiled")]
    assert choice[:1] + choice[3:5] == ("processes", "compiled", 1)
    experiment = small_experiment("fedavg", IMAGES | {"engine": "auto"})
    settled, _ = resolve_engine(experiment, NullProgress(), choice)
    assert (settled.config.engine, settled.config.execution, settled.config.stack_size) == (
        "processes",
        "compiled",
        1,
    )
    engine = make_engine(choice.name, experiment.task, choice.stack, 1, choice.execution)
    assert isinstance(engine, ProcessEngine)
    assert kind(engine) == ("processes", 1, "compiled")
    engine.close()


def test_convolutions_are_stacked_only_where_nobody_can_be_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stack's steps may be as fast as two workers', but evaluation, and a whole
    round does a lot of that, is not.
    """
    times = SLOW_LOOP | {
        ("vectorized", 64, "eager"): 0.03,
        ("vectorized", 64, "captured"): 0.05,
        ("vectorized", 64, "compiled"): 0.02,
    }
    choice, tried = choose_with(monkeypatch, times, workload=Workload(100_000))
    assert "vectorized" not in {name for name, *_ in tried}
    assert choice.name == "processes"
    choice, tried = choose_with(monkeypatch, times, workload=Workload(100_000), cores=1)
    assert "processes" not in {name for name, *_ in tried}
    assert choice[:1] + choice[3:4] == ("vectorized", "compiled")


# -------------------------------------------------- where one step takes longer than a trial should

HEAVY: Times = {
    ("sequential", 0, "eager"): 2.0,
    ("processes", 1, "eager"): 2.4,  # of two clients, one for each worker: 1.2 s a step
    ("processes", 1, "compiled"): 1.2,
}


def test_a_short_run_of_a_heavy_network_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, tried = choose_with(monkeypatch, HEAVY, workload=Workload(1))
    assert tried == []
    assert choice[:1] + choice[3:5] == ("processes", "eager", 1)
    assert (
        choice.reason
        == "processes: one step takes 2.00 s, so the arithmetic decides and stacking cannot pay"
    )


def test_a_long_run_of_a_heavy_network_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step a trial, and nothing of stacks or of steps that are only traced."""
    choice, tried = choose_with(monkeypatch, HEAVY, workload=Workload(1_000))
    assert tried == [("processes", 1, "eager"), ("processes", 1, "compiled")]
    assert choice[:1] + choice[3:5] == ("processes", "compiled", 1)
    assert choice.reason == (
        "processes compiled: one step takes 2.00 s, so the arithmetic decides and stacking"
        " cannot pay;"
        " 600.00 ms per local step (processes: 1200.00 ms)"
    )


def test_compiling_that_gains_nothing_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = choose_with(
        monkeypatch, HEAVY | {("processes", 1, "compiled"): 2.35}, workload=Workload(1_000)
    )
    assert choice[:1] + choice[3:5] == ("processes", "eager", 1)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.2, ("processes", "compiled", 1)), (2.1, ("sequential", "eager", 0))],
)
def test_on_one_core_a_worker_may_compile(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: tuple[str, str, int]
) -> None:
    choice, tried = choose_with(
        monkeypatch,
        HEAVY | {("processes", 1, "compiled"): seconds},
        cores=1,
        workload=Workload(1_000),
    )
    assert tried == [("sequential", 0, "eager"), ("processes", 1, "compiled")]
    assert choice[:1] + choice[3:5] == expected


def test_what_falls_back_is_no_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(engine: ProcessEngine, job: Any) -> Any:
        engine.degraded_reasons = (
            ["steps could not be traced (no such operation)"]
            if engine.execution == "captured"
            else []
        )
        return iter(())

    monkeypatch.setattr(ProcessEngine, "train", run)
    times = dict(SLOW_LOOP)
    choice, _ = choose_with(monkeypatch, times, workload=Workload(1))
    assert "could not" not in choice.reason
    measure = autotune.measure

    def measure_and_run(make: Any, job: Any, clock: Any, count: int) -> tuple[float, float]:
        made: list[Engine] = []

        def make_once() -> Engine:
            made.append(make())
            list(made[-1].train(job))
            return made[-1]

        return measure(make_once, job, clock, count)

    monkeypatch.setattr(autotune, "measure", measure_and_run)
    experiment = small_experiment("fedavg", IMAGES | {"clients.sample": 4})
    choice = choose_engine(
        experiment.task, make_work(experiment, first_state(experiment), 1), workload=Workload(2_000)
    )
    assert choice[:1] + choice[3:5] == ("processes", "eager", 1)
    assert choice.reason.endswith(
        "per local step (sequential: 10.00 ms); steps could not be traced (no such operation)"
    )
