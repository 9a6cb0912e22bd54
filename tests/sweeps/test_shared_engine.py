"""Runs that share a stack end exactly as they end alone: seeds, numbers, drift, what clients
keep, and runs that do not fit together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import remanence as rem
from remanence.core.errors import INTERRUPTED, OUT_OF_TIME, RunFailed, Stopped
from remanence.core.expressions import Call
from remanence.core.model import Model
from remanence.core.types import ModelState
from remanence.engines import stack_eval
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vector_steps import run_eagerly
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods import METHODS
from remanence.rounds import personalization
from remanence.sweeps import run_batcher
from remanence.sweeps.compatibility import can_batch
from remanence.sweeps.run_batcher import RunBatcher
from remanence.sweeps.shared_engine import EngineProxy, compute
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    DRIFTING,
    batch_norm_net,
    fast_config,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)

WITHOUT_SERVER = ("random", "dac", "hast", "oracle", "local")
IMAGES = {"data.name": "synthetic(samples=80, classes=4, shape='1x8x8', test=0.25)", "model": "cnn"}


def play_together(
    experiments: Sequence[BuiltExperiment], rounds: int, stack: int = 64, steps: str = "eager"
) -> tuple[list[Any], RunBatcher]:
    """-> how each of them ended, the batcher"""
    batcher = RunBatcher(lambda experiment: VectorizedEngine(experiment.task, stack, steps))

    def run(experiment: BuiltExperiment) -> Any:
        proxy = batcher.attach(experiment)
        try:
            return run_rounds(experiment, proxy, rounds)[0]
        finally:
            proxy.close()

    return batcher.run([partial(run, experiment) for experiment in experiments]), batcher


def assert_equal_alone(
    experiments: Sequence[BuiltExperiment], rounds: int = 2, tables: int = 1, **options: Any
) -> None:
    ends, batcher = play_together(experiments, rounds, **options)
    assert len(batcher.groups) == tables
    for end in ends:  # a failing run interrupts the others: raise its own error
        if isinstance(end, Exception):
            raise end
    for experiment, end in zip(experiments, ends, strict=True):
        alone, _ = run_rounds(experiment, VectorizedEngine(experiment.task, 64, "eager"), rounds)
        place, distance = max_rel_diff(state_tree(end), state_tree(alone))
        assert distance <= TOLERANCE, f"differs from the run alone by {distance:.1e} at {place}"


def drift(method: str) -> Mapping[str, Any]:
    return DRIFTING | {"drift.time_steps": 2} if method in WITHOUT_SERVER else {}


def with_other_numbers(experiment: BuiltExperiment) -> str:
    """The same method with every number half as large."""
    parts = experiment.task.method.method.parts
    return "+".join(
        str(Call(p.name, {**p.arguments, **{name: 0.5 * value for name, value in p.hyper.items()}}))
        for p in parts
    )


@pytest.mark.parametrize("method", METHODS)
def test_two_seeds_of_every_method_and_a_third_run_with_other_numbers(method: str) -> None:
    first = small_experiment(fast_config(method), {"seed": 1, **drift(method)})
    second = small_experiment(fast_config(method), {"seed": 2, **drift(method)})
    third = small_experiment(
        with_other_numbers(first), {"seed": 3, "local.lr": 0.02, **drift(method)}
    )
    # a pool is never padded, and so stays alone
    assert_equal_alone([first, second, third], tables=3 if method == "centralized" else 1)


@pytest.mark.parametrize("stack", [1, 3, 5])
def test_a_stack_cut_anywhere(stack: int) -> None:
    assert_equal_alone(
        [small_experiment("scaffold+wsm", {"seed": seed}) for seed in (1, 2, 3)], stack=stack
    )


def test_replayed_steps() -> None:
    assert_equal_alone(
        [small_experiment("fedprox(mu=0.1)", {"seed": seed}) for seed in (1, 2)], steps="captured"
    )


def test_images_local_models_and_single_examples() -> None:
    """Everything a ledger asks an engine for, answered for both runs at once."""
    changes = IMAGES | {
        "record.local": True,
        "record.cross": 4,
        "record.examples": True,
        "record.confusion": True,
    }
    assert_equal_alone([small_experiment("fedavg", changes | {"seed": seed}) for seed in (1, 2)])


def test_runs_that_do_different_things_take_turns() -> None:
    experiments = [
        small_experiment(method, {"seed": seed})
        for method in ("fedavg", "fedavg+wsm")
        for seed in (1, 2)
    ]
    experiments.append(small_experiment("fedavg", {"local.batch_size": 3}))
    assert_equal_alone(experiments, tables=3)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({}, {"seed": 7}, True),
        ({}, {"local.lr": 0.3}, True),
        ({}, {"local.optimizer": "sgd(lr=0.05, momentum=0.2)"}, True),
        # without momentum nothing keeps a velocity
        ({}, {"local.optimizer": "sgd(lr=0.05)"}, False),
        ({}, {"local.optimizer": "sgd(lr=0.05, momentum=0.5, nesterov=true)"}, False),
        ({}, {"local.optimizer": "adam"}, False),
        ({}, {"local.epochs": 2}, False),
        ({}, {"clients.count": 5}, False),
        ({}, {"data.partition": "iid"}, True),
        ({}, {"data.normalize": False}, False),
        ({}, {"precision": "fp32"}, False),
    ],
)
def test_what_may_differ(one: dict[str, Any], other: dict[str, Any], alike: bool) -> None:
    assert can_batch(small_experiment("fedavg", one), small_experiment("fedavg", other)) is alike


def test_batch_norm_is_never_padded() -> None:
    """Clients of 6 rows in one run and of 7 in the other: together, batches would need padding,
    which batch norm would see.
    """
    sizes = ("dirichlet(alpha=0.5, samples=8)", "dirichlet(alpha=0.5, samples=9)")
    one, other = (
        small_experiment("fedavg", {"data.partition": partition}, module=batch_norm_net())
        for partition in sizes
    )
    assert not can_batch(one, other)
    assert_equal_alone([one, other], tables=2)


# --------------------------------------------------------------------------- when something happens


def test_one_run_that_fails_is_named_and_the_others_are_told_to_stop() -> None:
    good, bad = (small_experiment("fedavg", {"seed": seed, "rounds": 500}) for seed in (1, 2))
    batcher = RunBatcher(lambda experiment: VectorizedEngine(experiment.task))

    def fail() -> None:
        proxy = batcher.attach(bad)
        try:
            run_rounds(bad, proxy, 1)
            raise RunFailed("the disk is full")
        finally:
            proxy.close()

    def run() -> Any:
        proxy = batcher.attach(good)
        try:
            return run_rounds(good, proxy, 500)
        finally:
            proxy.close()

    ends = batcher.run([run, fail])
    assert isinstance(ends[0], KeyboardInterrupt)
    assert isinstance(ends[1], RunFailed)


SMALL: dict[str, Any] = {
    "data": "synthetic(samples=300, classes=3, features=5)",
    "model": "mlp(hidden=6)",
    "clients": 5,
    "sample": 3,
    "rounds": 4,
    "engine": "vectorized",
    "precision": "fp64",
    "quiet": True,
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("ledger.bin"))
    }


def test_a_comparison_trains_seeds_and_rates_together(tmp_path: Path) -> None:
    options: dict[str, Any] = SMALL | {"seeds": 2, "grid": {"lr": [0.1, 0.05]}}
    apart = rem.compare("fedavg; fedprox(mu=0.1)", out=tmp_path / "apart", batch_runs=1, **options)
    joined = rem.compare("fedavg; fedprox(mu=0.1)", out=tmp_path / "joined", **options)
    assert all(run.finished for run in joined.runs)
    assert files_of(tmp_path / "joined") == files_of(tmp_path / "apart")
    for one, other in zip(joined.runs, apart.runs, strict=True):
        assert one.curve() == other.curve()


def test_a_comparison_that_is_stopped_goes_on_together(tmp_path: Path) -> None:
    straight = rem.compare("fedavg+wsm", seeds=3, out=tmp_path / "straight", **SMALL)
    with pytest.raises(
        Stopped, match="and 2 more in one stack, all saved: go on with remanence resume"
    ) as stop:
        rem.compare("fedavg+wsm", seeds=3, out=tmp_path / "cut", time_limit=1e-9, **SMALL)
    assert stop.value.exit_code == OUT_OF_TIME
    done = rem.resume(tmp_path / "cut", quiet=True)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "straight")
    assert [run.curve() for run in done.runs] == [run.curve() for run in straight.runs]


def test_control_c_saves_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = VectorizedEngine.train_runs, []

    def interrupted(self: VectorizedEngine, works: Any) -> Any:
        calls.append(works)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, works)

    with monkeypatch.context() as patch:
        patch.setattr(VectorizedEngine, "train_runs", interrupted)
        with pytest.raises(Stopped, match="all saved") as stop:
            rem.compare("fedavg", seeds=2, out=tmp_path / "cut", **SMALL)
    assert stop.value.exit_code == INTERRUPTED
    assert [len(works) for works in calls] == [2, 2, 2]
    rem.resume(tmp_path / "cut", quiet=True)
    rem.compare("fedavg", seeds=2, out=tmp_path / "straight", **SMALL)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "straight")


def test_scoring_with_too_little_memory_takes_fewer_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for 7 rows of all models together: 10,000 are halved until they fit, and the counts
    are the same.
    """
    experiment = small_experiment("fedavg", {"data.public": 9})
    engine, models = (
        VectorizedEngine(experiment.task),
        ModelState.stack([experiment.task.model.initial] * 2),
    )
    whole, said = (
        engine.score(models, "test"),
        engine.predict_logits(models, experiment.task.public),
    )
    predict = Model.predict

    def scarce(self: Model, model: ModelState, x: Any) -> Any:
        if 2 * len(x) > 7:
            raise MemoryError
        return predict(self, model, x)

    monkeypatch.setattr(Model, "predict", scarce)
    again = engine.score(models, "test")
    assert again.confusion.tolist() == whole.confusion.tolist()
    assert again.loss.flatten().tolist() == pytest.approx(whole.loss.flatten().tolist(), abs=1e-12)
    assert engine.max_rows == 4
    engine.max_rows = 16
    assert torch.allclose(
        engine.predict_logits(models, experiment.task.public), said, rtol=0, atol=1e-12
    )
    assert engine.max_rows == 4


def test_servers_that_stop_early_do_not_separate_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedDF evaluates its validation examples as often as it takes, which differs from run to run:
    the next round is one stack all the same.
    """
    method, computed = (
        "feddf(steps=40, patience=5, lr=0.05, validation=0.4, batch=4)",
        list[tuple[str, int]](),
    )

    def watched(proxies: Sequence[EngineProxy]) -> list[Any]:
        computed.append((type(proxies[0].request).__name__, len(proxies)))
        return compute(proxies)

    monkeypatch.setattr(run_batcher, "compute", watched)
    ends, _ = play_together(
        [small_experiment(method, {"seed": seed, "data.public": 20}) for seed in (1, 2, 3)],
        rounds=4,
    )
    assert [many for kind, many in computed if kind == "ClientWork"] == [3, 3, 3, 3]
    assert [many for kind, many in computed if kind == "Callback"] == [1] * 12
    for seed, end in zip((1, 2, 3), ends, strict=True):
        alone = small_experiment(method, {"seed": seed, "data.public": 20})
        assert (
            max_rel_diff(
                state_tree(end), state_tree(run_rounds(alone, VectorizedEngine(alone.task), 4)[0])
            )[1]
            <= TOLERANCE
        )


def test_servers_compile_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not made for two threads at once, of which one failed and took the
    compiler with it.
    """
    changes = {"data.public": 18, "local.optimizer": "sgd(lr=0.1)"}
    experiments = [
        small_experiment("flashback(server_epochs=2)", changes | {"seed": seed}) for seed in (1, 2)
    ]

    class Compiling(VectorizedEngine):
        """Runs the clients' steps eagerly, which takes less time."""

        def __init__(self, task: Any, *_: Any):
            super().__init__(task, 64, "eager")
            self.execution = "compiled"

        def _run_steps(self, task: Any, number: int, dims: Any, active: Any, schedule: Any) -> Any:
            return run_eagerly(task, dims, active, schedule)

    with monkeypatch.context() as patch:
        # which is what runs that play together are given
        patch.setitem(globals(), "VectorizedEngine", Compiling)
        ends, _ = play_together(experiments, rounds=2)
    for experiment, end in zip(experiments, ends, strict=True):
        (known,) = experiment.task.engine_cache["server steps"]
        assert known.steps.compile
        alone = small_experiment(
            "flashback(server_epochs=2)", changes | {"seed": experiment.config.seed}
        )
        assert (
            max_rel_diff(
                state_tree(end), state_tree(run_rounds(alone, VectorizedEngine(alone.task), 2)[0])
            )[1]
            <= TOLERANCE
        )


def test_personal_models_are_fine_tuned_one_run_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their engine is the run's own, and captures steps on a GPU: never in the run's thread."""
    make, threads = personalization.make_models, list[threading.Thread]()

    def watched(*arguments: Any) -> ModelState:
        threads.append(threading.current_thread())
        return make(*arguments)

    monkeypatch.setattr(personalization, "make_models", watched)
    changes = {"engine": "vectorized", "record.personal": 3}
    assert_equal_alone(
        [small_experiment("fedbabu", changes | {"seed": seed}) for seed in (1, 2)], rounds=1
    )
    assert len(threads) == 4  # two runs together, and each of them alone
    assert set(threads) == {threading.main_thread()}


def test_more_teachers_than_a_stack_holds_predict_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_experiment("fedavg", {"data.public": 9})
    models, seen, predict = (
        ModelState.stack([experiment.task.model.initial] * 5),
        [],
        stack_eval.predict_logits_stacked,
    )

    def watched(task: Any, some: ModelState, *rest: Any) -> Any:
        seen.append(len(next(iter(some.params.values()))))
        return predict(task, some, *rest)

    wanted = SequentialEngine(experiment.task).predict_logits(models, experiment.task.public)
    monkeypatch.setattr(stack_eval, "predict_logits_stacked", watched)
    assert torch.allclose(
        VectorizedEngine(experiment.task, 2).predict_logits(models, experiment.task.public),
        wanted,
        rtol=0,
        atol=1e-12,
    )
    assert seen == [2, 2, 1]
