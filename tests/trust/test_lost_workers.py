"""Worker processes that die or hang: their work is repeated, and no call waits longer than twice
the timeout.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.context
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from rounds.test_resume import contents, seeded_net, small_config
from trust.faults import record_trial
from trust.killing import in_child

from remanence.core.engine import ClientWork
from remanence.core.errors import RunFailed
from remanence.core.types import Reply
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.worker_pool import WorkerPool
from remanence.results.run import EXPERIMENT
from remanence.rounds.loop import resume_run, start_run
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment, state_tree

TIMEOUT = 3.0


def once(mark: Path) -> bool:
    """True for the first caller, in any process."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def trouble(monkeypatch: pytest.MonkeyPatch, happens: Callable[[ClientWork], object]) -> None:
    """A fault in the worker that trains; set before the workers are forked."""
    train = SequentialEngine.train_client

    def troubled(self: SequentialEngine, job: ClientWork, place: int) -> Reply:
        if self.channels_last:  # only workers lay images out like this
            happens(job)
        return train(self, job, place)

    monkeypatch.setattr(SequentialEngine, "train_client", troubled)


def straight() -> Any:
    experiment = small_experiment("scaffold", {"clients.sample": 6})
    return state_tree(run_rounds(experiment, SequentialEngine(experiment.task), 2)[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_work_of_a_dead_worker_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    wanted = straight()

    def die(job: ClientWork) -> None:
        if int(job.clients[0]) == 2 and once(tmp_path / "mark"):
            faulthandler.disable()  # the crash is intended: no traces
            os.kill(os.getpid(), number)

    trouble(monkeypatch, die)
    experiment = small_experiment("scaffold", {"clients.sample": 6})
    with closing(ProcessEngine(experiment.task, 2, timeout=60)) as engine:
        state, lines = run_rounds(experiment, engine, 2)
        assert len(engine.pool.losses) == 1
    assert max_rel_diff(state_tree(state), wanted)[1] < 1e-12
    assert all(line["replies"] == 6 and "no_response" not in line for line in lines)
    record_trial(
        "a worker process is killed",
        "another worker did its work; the same model",
        engine="processes",
    )


def test_work_that_kills_every_worker_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that needs too much memory fails everywhere: after three deaths the run ends with an
    error.
    """
    trouble(
        monkeypatch, lambda job: int(job.clients[0]) == 2 and os.kill(os.getpid(), signal.SIGKILL)
    )
    experiment = small_experiment("fedavg", {"clients.sample": 6})
    with (
        closing(ProcessEngine(experiment.task, 2)) as engine,
        pytest.raises(RunFailed, match=r"lost 3 times .* go on with remanence resume"),
    ):
        run_rounds(experiment, engine, 1)


def test_the_work_of_a_worker_that_hangs_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped as by a debugger: it does not react to SIGTERM."""
    wanted = straight()
    trouble(
        monkeypatch,
        lambda job: (
            int(job.clients[0]) == 4
            and once(tmp_path / "mark")
            and os.kill(os.getpid(), signal.SIGSTOP)
        ),
    )
    experiment = small_experiment("scaffold", {"clients.sample": 6})
    begin = time.monotonic()
    with closing(ProcessEngine(experiment.task, 2, timeout=TIMEOUT)) as engine:
        state, lines = run_rounds(experiment, engine, 2)
    assert TIMEOUT < time.monotonic() - begin < 2 * TIMEOUT + 5
    assert max_rel_diff(state_tree(state), wanted)[1] < 1e-12
    assert all(line["replies"] == 6 for line in lines)
    record_trial(
        "a worker process hangs", "ended after the timeout; the same model", engine="processes"
    )


def test_a_client_that_always_hangs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble(monkeypatch, lambda job: int(job.clients[0]) == 4 and time.sleep(1000))
    experiment = small_experiment("fedavg", {"clients.sample": 6})
    begin = time.monotonic()
    with closing(ProcessEngine(experiment.task, 2, timeout=1.0)) as engine:
        _, lines = run_rounds(experiment, engine, 2)
    assert time.monotonic() - begin < 2 * (2 * 1.0) + 6  # two rounds, twice the timeout each
    assert [(line["replies"], line["no_response"], line["abandoned"]) for line in lines] == [
        (5, [4], False)
    ] * 2
    record_trial(
        "a client that hangs every time",
        "skipped and reported; the run continued",
        2,
        engine="processes",
    )


def test_an_evaluation_that_always_hangs_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    score = SequentialEngine.score_rows

    def hang(self: SequentialEngine, *arguments: Any) -> Any:
        return time.sleep(1000) if self.channels_last else score(self, *arguments)

    monkeypatch.setattr(SequentialEngine, "score_rows", hang)
    experiment = small_experiment("fedavg", {"clients.sample": 6})
    begin = time.monotonic()
    with (
        closing(ProcessEngine(experiment.task, 2, timeout=1.0)) as engine,
        pytest.raises(RunFailed, match="did not end within 1 s"),
    ):
        run_rounds(experiment, engine, 1)
    assert time.monotonic() - begin < 2 * 1.0 + 6
    record_trial(
        "an evaluation that hangs every time",
        "an error message within twice the timeout",
        engine="processes",
    )


def children_of(process: int) -> Iterator[int]:
    yield from (child.pid for child in psutil.Process(process).children(recursive=True))


@pytest.mark.parametrize("wait", [0.1, 0.5])
def test_workers_end_with_their_coordinator(tmp_path: Path, wait: float) -> None:
    config = small_config(engine="processes", workers=2, rounds=4)
    start_run(config, tmp_path / "straight", module=seeded_net())
    child = in_child(lambda: start_run(config, tmp_path / "run", module=seeded_net()))
    while child.is_alive() and not list(children_of(child.pid)):
        time.sleep(0.01)
    time.sleep(wait)
    workers = list(children_of(child.pid))
    child.kill()
    child.join()
    for _ in range(100):
        if not any(
            psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
            for worker in workers
        ):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("workers outlived their coordinator by 10 s")
    if (tmp_path / "run" / EXPERIMENT).exists():
        resume_run(tmp_path / "run", module=seeded_net())
    else:
        start_run(config, tmp_path / "run", overwrite=True, module=seeded_net())
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial(
        "the coordinator is killed, workers running",
        "workers ended; the same bits",
        engine="processes",
    )


def test_a_worker_does_not_run_the_clean_up_of_its_parent(tmp_path: Path) -> None:
    """A process that started a cluster ends it on SIGTERM. Workers forked from it may get that
    signal at any time, even before they run.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: (tmp_path / str(os.getpid())).touch())
    try:
        for _ in range(20):
            pool = WorkerPool(lambda pipe, inherited: time.sleep(60), 2, timeout=0)
            children = [worker.process for worker in pool.workers]
            pool.close()
            assert [child.exitcode for child in children] == [-signal.SIGTERM, -signal.SIGTERM]
        assert not list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)  # the parent's own is as it was
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = multiprocessing.context.ForkProcess.start, psutil.Process().children()

    def refuse_the_third(self: Any) -> None:
        if len(psutil.Process().children()) - len(before) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        start(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", refuse_the_third)
    with pytest.raises(
        RunFailed, match=r"process 2 could not be started .*unavailable.*: use fewer workers"
    ):
        WorkerPool(lambda pipe, inherited: time.sleep(60), 3, timeout=0)
    assert psutil.Process().children() == before
