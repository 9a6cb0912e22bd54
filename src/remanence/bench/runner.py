"""Times jobs: the engine, the plain loop and the lower bound take turns in one process, and the
median of several turns counts.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remanence.bench.baselines import (
    make_lower_bound,
    make_scoring_lower_bound,
    plain_model,
    score_models,
    train_clients,
)
from remanence.bench.jobs import JOBS, BenchJob, prepare
from remanence.bench.machine import about_machine, watching_memory
from remanence.bench.plain_engine import PlainEngine
from remanence.core.engine import ClientWork, Engine
from remanence.core.errors import InputError, RunFailed, unknown
from remanence.core.process_state import preserve_process_state
from remanence.core.signals import sigterm_as_interrupt
from remanence.core.types import ModelState, Reply
from remanence.engines.autotune import EngineChoice, choose_engine
from remanence.engines.cost import Workload
from remanence.engines.run_slices import RunWork
from remanence.engines.table import make_engine
from remanence.engines.vectorized import MAX_STACK, VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.torch_setup import set_precision
from remanence.rounds.setup import make_round
from remanence.testing.toy_task import max_rel_diff, run_rounds
from remanence.training import server_step
from remanence.training.server_step import local_models
from remanence.training.state import RunState

# largest difference between a round and the plain loop's in float64, relative to max(1, |value|)
CLOSE = 1e-9
# rounds of the run for which the engine is chosen: enough for compiling to pay off
LONG_RUN = 100_000


@preserve_process_state()
def run_jobs(
    names: Sequence[str],
    *,
    device: str = "auto",
    precision: str = "fp32",
    repeat: int = 5,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run jobs and the jobs they are compared with.

    Args:
        names: Names in `JOBS`; none: all that fit the device.
        device: "auto", "cpu" or "cuda".
        precision: As in an experiment.
        repeat: Timed turns of each contender.
        say: Called with a line for each job before it starts.

    Returns:
        One dictionary for each job, as `remanence bench --json` prints them.
    """
    if repeat < 1:
        raise InputError(f"--repeat {repeat} measures nothing: give at least 1")
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    chosen = list(names) or [name for name, job in JOBS.items() if cuda or not job.cuda_only]
    for name in chosen:
        if name not in JOBS:
            raise unknown("job", name, JOBS)
    results: dict[str, dict[str, Any]] = {}
    # Ctrl-C ends the measuring and keeps the results so far
    with contextlib.suppress(KeyboardInterrupt), sigterm_as_interrupt():
        for name in chosen:
            for needed in (JOBS[name].relative_to, name):
                if needed and needed not in results:
                    say(f"{needed}: {JOBS[needed].about}")
                    measured = measure(JOBS[needed], device, precision, repeat)
                    results[needed] = measured | _relate(
                        measured, results.get(JOBS[needed].relative_to)
                    )
                    torch.compiler.reset()  # free the job's compiled steps
    return list(results.values())


def _relate(measured: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    return (
        {}
        if other is None
        else {
            "relative_to": other["job"],
            "ratio_to_relative": measured["seconds"] / other["seconds"],
        }
    )


def measure(job: BenchJob, device: str, precision: str, repeat: int) -> dict[str, Any]:
    """All numbers of one job."""
    if job.measure == "memory":
        return measure_memory(job, device, precision)
    if job.measure == "together":
        return measure_batched(job, device, precision, repeat)
    threads = torch.get_num_threads()
    experiment, state, work = prepare(job, device, precision)
    choice, engine = start_engine(experiment, work)
    ours_threads = choice.threads
    try:
        difference = compare_with_plain(job, device, choice)
        set_precision(experiment.config)  # the comparison changed it to float64
        rows = count_rows(experiment, work)
        lower_bound = None  # not defined for a round in which peers are evaluated and averaged
        if job.measure == "score":
            plain, ours, lower_bound, rows = scoring(experiment, state, work, engine)
        elif job.measure == "round":
            plain, ours = (
                partial(run_once, experiment, state, each)
                for each in (PlainEngine(experiment), engine)
            )
        else:
            plain, ours, lower_bound = training(experiment, state, work, engine)
        contenders = {"plain": (plain, threads), "ours": (ours, ours_threads)} | (
            {"lower_bound": (lower_bound, threads)} if lower_bound else {}
        )
        times = interleave(contenders, repeat, experiment.task.info.device)
        with watching_memory(experiment.task.info.device) as peak:
            ours()
    finally:
        engine.close()
        torch.set_num_threads(threads)
    seconds, sequential = statistics.median(times["ours"]), statistics.median(times["plain"])
    lower_bound_seconds = (
        statistics.median(times["lower_bound"]) if "lower_bound" in times else None
    )
    more = {
        "ratio_to_sequential": sequential / seconds,
        "share_of_lower_bound": lower_bound_seconds and lower_bound_seconds / seconds,
        "sequential_seconds": sequential,
        "lower_bound_seconds": lower_bound_seconds,
        "difference_in_float64": difference,
    }
    return describe(job, experiment, ours_threads, times, rows, peak(), choice.reason) | more


def describe(
    job: BenchJob,
    experiment: BuiltExperiment,
    threads: int,
    times: Mapping[str, Sequence[float]],
    rows: int,
    peak: int,
    engine: str,
) -> dict[str, Any]:
    """The fields of every result. Comparisons that a job does not have are None."""
    seconds = statistics.median(times["ours"])
    return {
        "job": job.name,
        "about": job.about,
        "ratio_to_sequential": None,
        "share_of_lower_bound": None,
        "samples_per_second": rows / seconds,
        "seconds": seconds,
        "all_seconds": {name: list(turns) for name, turns in times.items()},
        "peak_memory_bytes": peak,
        "engine": engine,
        "relative_to": None,
        "ratio_to_relative": None,
        **about_machine(experiment, threads),
    }


def start_engine(experiment: BuiltExperiment, work: ClientWork) -> tuple[EngineChoice, Engine]:
    choice = choose_engine(experiment.task, work, workload=Workload(LONG_RUN))
    return choice, make_engine(
        choice.name, experiment.task, choice.stack, execution=choice.execution
    )


def training(
    experiment: BuiltExperiment, state: RunState, work: ClientWork, engine: Engine
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """A round up to the new global model by the plain loop, the engine and the lower bound."""
    return (
        lambda: train_clients(experiment, state, work),
        lambda: train_ours(experiment, state, work, engine),
        make_lower_bound(experiment, work),
    )


def train_ours(
    experiment: BuiltExperiment, state: RunState, work: ClientWork, engine: Engine
) -> ModelState:
    replies = Reply.concat(list(engine.train(work)))
    return server_step.update(
        experiment.task, state.server, replies, work.round, work.key, work.optimizer_hparams, engine
    ).server.model


def scoring(
    experiment: BuiltExperiment, state: RunState, work: ClientWork, engine: Engine
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any], int]:
    """The local models of a round on the test set by the plain loop, the engine and the lower
    bound, and the number of evaluated examples.
    """
    models = local_models(state.server.model, Reply.concat(list(engine.train(work))))
    many, classes = len(work.clients), torch.arange(experiment.task.info.num_classes)
    modules = [load(plain_model(experiment), models.select(number)) for number in range(many)]
    correct = score_models(experiment, modules).cpu()
    ours = engine.score(models, "test").confusion[:, 0, classes, classes].sum(dim=1)
    # in single precision a few predictions may differ
    if int((correct - ours).abs().max()) > len(experiment.task.test.y) // 1000:
        raise RunFailed(
            f"the engine counts {ours.tolist()} correct predictions where the plain loop counts"
            f" {correct.tolist()}: please report this"
        )
    return (
        lambda: score_models(experiment, modules),
        lambda: engine.score(models, "test"),
        make_scoring_lower_bound(experiment, modules[0], many),
        many * len(experiment.task.test.y),
    )


def load(module: nn.Module, model: ModelState) -> nn.Module:
    module.load_state_dict({**model.params, **model.buffers}, strict=False)
    return module


def run_once(experiment: BuiltExperiment, state: RunState, engine: Engine) -> ModelState:
    """A whole round without a server, from the same state every time. -> all clients' models"""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(make_round(experiment, engine, Path(folder))) as round,
    ):
        after, _ = round.run(state)
    assert after.client_models is not None
    return after.client_models.models


def compare_with_plain(job: BenchJob, device: str, choice: EngineChoice) -> float | None:
    """Run one round in float64 on the engine and in the plain loop.

    Returns:
        The largest difference; None for jobs that are not compared.

    Raises:
        RunFailed: If they differ by more than `CLOSE`.
    """
    if job.measure not in ("train", "round"):
        return None
    experiment, state, work = prepare(job, device, "fp64")
    with contextlib.closing(
        make_engine(choice.name, experiment.task, choice.stack, execution=choice.execution)
    ) as engine:
        if job.measure == "round":
            plain, ours = (
                run_once(experiment, state, each).params
                for each in (PlainEngine(experiment), engine)
            )
        else:
            plain = train_clients(experiment, state, work).state_dict()
            ours = train_ours(experiment, state, work, engine).params
    place, difference = max_rel_diff(ours, {name: plain[name] for name in ours})
    if difference > CLOSE:
        raise RunFailed(
            f"job {job.name}: {place} differs from the plain loop by {difference:.1e} in"
            " float64: please report this"
        )
    return difference


def measure_batched(job: BenchJob, device: str, precision: str, repeat: int) -> dict[str, Any]:
    """The training of several seeds as one stack; the job with one seed is another one."""
    threads = torch.get_num_threads()
    prepared = [prepare(job, device, precision, {"seed": seed}) for seed in range(job.seeds)]
    experiment, _, work = prepared[0]
    works = [RunWork(each.task, one) for each, _, one in prepared]
    choice = choose_engine(experiment.task, work, workload=Workload(LONG_RUN))
    with contextlib.closing(
        VectorizedEngine(experiment.task, MAX_STACK["cuda"], choice.execution)
    ) as engine:  # on a CPU too
        ours = partial(train_works, engine, works)
        times = interleave({"ours": (ours, choice.threads)}, repeat, experiment.task.info.device)
        with watching_memory(experiment.task.info.device) as peak:
            ours()
    torch.set_num_threads(threads)
    rows = sum(count_rows(each, one) for each, _, one in prepared)
    return describe(
        job,
        experiment,
        choice.threads,
        times,
        rows,
        peak(),
        f"vectorized, steps {engine.execution}",
    )


def train_works(engine: VectorizedEngine, works: Sequence[RunWork]) -> None:
    for _ in engine.train_runs(works):
        pass


def interleave(
    contenders: dict[str, tuple[Callable[[], Any], int]],
    repeat: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each contender, interleaved so that other load affects all alike. The first turn
    is a warm-up and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeat + 1):
        for name, (function, threads) in contenders.items():
            torch.set_num_threads(threads)
            wait_for(device)
            begin = clock()
            function()
            wait_for(device)
            if turn:
                times[name].append(clock() - begin)
    return times


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_rows(experiment: BuiltExperiment, work: ClientWork) -> int:
    """Training examples processed in a round."""
    sizes = experiment.task.population.at(work.time_step).train.sizes[work.clients]
    return int(sizes.sum()) * experiment.config.local.epochs


def measure_memory(job: BenchJob, device: str, precision: str) -> dict[str, Any]:
    """Peak memory of whole rounds, including making the data and the clients, relative to the same
    job with fewer clients.
    """
    peaks, seconds, rows = [], 0.0, 0
    threads = torch.get_num_threads()
    for settings in (job.smaller, {}):
        gc.collect()
        torch.set_num_threads(threads)  # the choice of an engine changes them
        with watching_memory(torch.device("cpu")) as peak:
            experiment, _, work = prepare(job, device, precision, settings)
            choice, engine = start_engine(experiment, work)
            begin = time.perf_counter()
            with contextlib.closing(engine):
                run_rounds(experiment, engine, job.rounds)
            seconds, rows = (time.perf_counter() - begin) / job.rounds, count_rows(experiment, work)
        peaks.append(peak())
    torch.set_num_threads(threads)
    other = f"{job.name} with {job.smaller['clients.count']:,} clients (memory)"
    times = {"ours": [seconds]}
    return describe(job, experiment, choice.threads, times, rows, peaks[1], choice.reason) | {
        "relative_to": other,
        "ratio_to_relative": peaks[1] / peaks[0],
    }
