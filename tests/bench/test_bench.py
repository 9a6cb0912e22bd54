"""`remanence bench` on small jobs: its checks, its output, and its baselines."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from remanence.bench import JOBS, baselines, render, run_jobs, runner
from remanence.bench.baselines import train_clients
from remanence.bench.jobs import BenchJob, prepare
from remanence.bench.machine import peak_of_process
from remanence.bench.runner import compare_with_plain, interleave
from remanence.cli.main import app
from remanence.core.errors import InputError, RunFailed
from remanence.engines.autotune import EngineChoice

FIELDS = {
    "job",
    "ratio_to_sequential",
    "share_of_lower_bound",
    "samples_per_second",
    "seconds",
    "peak_memory_bytes",
    "device",
    "precision",
    "engine",
    "relative_to",
    "ratio_to_relative",
}
TINY: dict[str, Any] = {
    "data.name": "synthetic(samples=60, classes=4, shape='1x16x16', test=0.2)",
    "clients.count": 4,
    "clients.sample": 3,
    "local.batch_size": 5,
    "local.epochs": 1,
}
LOOP, STACKED = (
    EngineChoice("sequential", 1, "sequential: as asked"),
    EngineChoice("vectorized", 1, "vectorized: as asked", "eager"),
)


def tiny(name: str, **changes: Any) -> BenchJob:
    job = JOBS[name]
    model = (
        {"model": "lenet"}
        if name != "H"
        else {"data.name": "synthetic(samples=60, classes=4, features=5, test=0.2)"}
    )
    public = (
        {"data.public": 8}
        if name == "E"
        else {"drift.samples": 7, "drift.validation": 3}
        if name == "D"
        else {}
    )
    return replace(job, settings={**job.settings, **TINY, **model, **public, **changes})


@pytest.fixture
def tiny_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("A", "B", "D", "E", "F", "G"):
        monkeypatch.setitem(JOBS, name, tiny(name))
    monkeypatch.setitem(JOBS, "H", replace(tiny("H"), rounds=2, smaller={"clients.count": 3}))
    # a compiler takes half a minute
    monkeypatch.setattr(baselines, "compiler_works", lambda device: False)
    monkeypatch.setattr(runner, "choose_engine", lambda task, job, workload: STACKED)


@pytest.mark.parametrize("name", ["A", "B", "B2", "D", "E"])
@pytest.mark.parametrize("choice", [LOOP, STACKED])
def test_a_round_equals_the_plain_loop_in_float64(name: str, choice: EngineChoice) -> None:
    partition = (
        {"data.partition": "dirichlet_by_class(alpha=0.5, minimum=2)"} if name == "B2" else {}
    )
    difference = compare_with_plain(tiny(name, **partition), "cpu", choice)
    assert difference is not None
    assert difference < 1e-12


def test_a_wrong_round_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop with a slightly different learning rate."""
    make = baselines.make_optimizer
    monkeypatch.setattr(
        baselines,
        "make_optimizer",
        lambda model, e, job: make(
            model,
            e,
            job._replace(
                optimizer_hparams=job.optimizer_hparams
                | {"lr": 1.001 * job.optimizer_hparams["lr"]}
            ),
        ),
    )
    with pytest.raises(RunFailed, match=r"job B: .* differs from the plain loop by"):
        compare_with_plain(tiny("B"), "cpu", LOOP)


def test_flashback_distills() -> None:
    """With label counts of zero it would equal FedAvg, and the comparison would be void."""
    with_teachers = prepare(tiny("E"), "cpu", "fp64")
    model = train_clients(*with_teachers).state_dict()
    experiment, state, job = with_teachers
    silent = replace(
        state,
        server=replace(
            state.server,
            state={"flashback": state.server.state["flashback"] | {"pi": torch.zeros(4).double()}},
        ),
    )
    assert not torch.allclose(
        train_clients(experiment, silent, job).state_dict()["head.weight"], model["head.weight"]
    )


@pytest.mark.usefixtures("tiny_jobs")
def test_the_check_in_float64_does_not_change_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """allow_tf32 is a setting of the whole process, and the experiment of the check changes it."""
    seen: list[bool] = []

    def check(job: BenchJob, device: str, choice: EngineChoice) -> float:
        torch.backends.cudnn.allow_tf32 = True
        return 0.0

    monkeypatch.setattr(runner, "compare_with_plain", check)
    monkeypatch.setattr(
        runner,
        "interleave",
        lambda *arguments: seen.append(torch.backends.cudnn.allow_tf32) or interleave(*arguments),
    )
    run_jobs(["B"], device="cpu", repeat=1, say=lambda line: None)
    assert seen == [False]


@pytest.mark.usefixtures("tiny_jobs")
def test_results() -> None:
    said: list[str] = []
    results = run_jobs(["F", "A"], device="cpu", repeat=1, say=said.append)
    # F is compared with B, which was not named
    assert [result["job"] for result in results] == ["B", "F", "A"]
    assert [line[:2] for line in said] == ["B:", "F:", "A:"]
    for result in results:
        assert set(result) >= FIELDS
        for name in (
            "ratio_to_sequential",
            "share_of_lower_bound",
            "samples_per_second",
            "seconds",
            "peak_memory_bytes",
        ):
            assert result[name] > 0
        assert result["ratio_to_sequential"] == pytest.approx(
            result["sequential_seconds"] / result["seconds"]
        )
        assert (result["device"], result["precision"], result["engine"]) == (
            "cpu",
            "fp32",
            "vectorized: as asked",
        )
    assert results[1]["relative_to"] == "B"
    assert results[1]["ratio_to_relative"] == pytest.approx(
        results[1]["seconds"] / results[0]["seconds"]
    )
    assert results[0]["relative_to"] is None


@pytest.mark.usefixtures("tiny_jobs")
def test_the_command() -> None:
    done = CliRunner().invoke(
        app, ["bench", "E", "D", "G", "H", "--json", "--device", "cpu", "--repeat", "1"]
    )
    assert done.exit_code == 0
    results = json.loads(done.stdout)
    assert [result["job"] for result in results] == ["B", "E", "A", "D", "G", "H"]
    assert [result["relative_to"] for result in results] == [
        None,
        "B",
        None,
        "A",
        "A",
        "H with 3 clients (memory)",
    ]
    assert results[3]["share_of_lower_bound"] is None
    assert results[5]["peak_memory_bytes"] > 2**20
    table = render(results)
    assert table.splitlines()[0].startswith("| job")
    assert f"torch {torch.__version__}" in table


@pytest.mark.usefixtures("tiny_jobs")
@pytest.mark.parametrize("name", ["A", "G", "H"])
def test_a_job_leaves_the_threads_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The engine chosen for a job may take one thread; the plain loop of the next takes all."""

    def choose(task: Any, work: Any, workload: Any) -> EngineChoice:
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        return STACKED

    monkeypatch.setattr(runner, "choose_engine", choose)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = runner.measure(JOBS[name], "cpu", "fp32", 1)
        assert (result["threads"], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: run_jobs(["X"]), "unknown job 'X'"),
        (lambda: run_jobs(["B"], repeat=0), "--repeat 0 measures nothing"),
        (lambda: run_jobs(["B"], device="tpu"), "tpu"),
    ],
)
def test_refusals(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call()


def test_contenders_take_turns_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name), 1) for name in "ab"}
    times = interleave(contenders, 2, torch.device("cpu"))
    assert calls == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}


def test_memory_is_that_of_this_process() -> None:
    """New pages from the system: an allocator may reuse pages of earlier tests."""
    with runner.watching_memory(torch.device("cpu")) as peak, mmap.mmap(-1, 64 * 2**20) as block:
        before = peak_of_process()
        block.write(bytes([1]) * len(block))
        assert peak() - before > 48 * 2**20


def test_every_job_can_be_built_from_its_settings() -> None:
    """Their sizes are in benchmarks/README.md: 250, 500 and 450 examples a client."""
    from remanence.config import parse_experiment

    for job in JOBS.values():
        config = parse_experiment({}, dict(job.settings))
        assert config.data.validation == 0
        assert job.relative_to in ("", *JOBS)


@pytest.mark.usefixtures("tiny_jobs")
def test_what_was_measured_before_control_c_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.measure

    def stopped(job: BenchJob, *rest: Any) -> dict[str, Any]:
        if job.name == "F":
            raise KeyboardInterrupt
        return whole(job, *rest)

    monkeypatch.setattr(runner, "measure", stopped)
    assert [
        result["job"]
        for result in run_jobs(["F", "A"], device="cpu", repeat=1, say=lambda line: None)
    ] == ["B"]
