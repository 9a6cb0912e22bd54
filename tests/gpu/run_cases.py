"""Whole runs on the GPU: drift, no server, several runs in one stack, memory that does not suffice,
and runs that must repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu.cases import (
    Case,
    assert_not_degraded,
    assert_rounds_succeed,
    compare_runs,
    compare_with_sequential,
    counted,
    difference,
    without_tracing,
)
from gpu.engine_cases import IMAGES, images
from rounds.test_resume import contents
from sweeps.test_shared_engine import play_together

from remanence.config import parse_experiment
from remanence.core.types import Reply
from remanence.engines.captured_steps import CapturedPhase
from remanence.engines.run_slices import RunSlice, count_clients
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods import METHODS, PARTS
from remanence.rounds.federated import make_work
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import (
    drifting_experiment,
    fast_config,
    run_rounds,
    small_experiment,
    state_tree,
    with_client_models,
)

ONLY_GPU = "only the memory of a GPU can be limited here"
DRIFTING = ("fedavg", "scaffold+wsm", "feddrift", "random", "dac", "hast", "oracle", "local")
# a model of 35 MB for each client, and examples small enough that only the models take memory
LARGE = {
    "data.name": "synthetic(samples=1200, classes=4, features=64, test=0.5)",
    "data.partition": "iid",
    "clients.count": 8,
    "clients.sample": 8,
    "local.batch_size": 25,
    "model": "mlp(hidden='2048,2048')",
}


def drifting(method: str, device: str) -> BuiltExperiment:
    return drifting_experiment(method, 3, {"device": device})


def sweep(execution: str, device: str) -> float:
    """Three seeds and a run with another learning rate, in one stack; each as it is alone."""
    changes: list[dict[str, Any]] = [{"seed": seed} for seed in (1, 2, 3)]
    changes.append({"seed": 4, "local.lr": 0.02})
    method = "scaffold+fedprox(mu=0.1)"
    together = [images(method, device, **each) for each in changes]
    with without_tracing(device), counted(CapturedPhase, "_capture") as captured:
        ends, batcher = play_together(together, 2, steps=execution)
    (group,) = batcher.groups  # its engine is closed
    assert group.engine.degraded_reason == "", group.engine.degraded_reason
    assert bool(captured) == (execution != "eager")
    largest = 0.0
    for each, end in zip(changes, ends, strict=True):
        if isinstance(end, BaseException):
            raise end
        alone = images(method, "cpu", **each)
        expected, _ = run_rounds(alone, SequentialEngine(alone.task), 2)
        largest = max(largest, difference(state_tree(end), state_tree(expected)))
    return largest


# ------------------------------------------------------------------------------------------- memory


def seam_out_of_memory(execution: str, device: str) -> float:
    """Memory for two clients, by an error in place of the device's: 6 fail, 3 fail, then 1."""
    whole, tried = VectorizedEngine._train_stack, list[int]()

    def train(engine: VectorizedEngine, slices: Sequence[RunSlice]) -> list[Reply]:
        tried.append(count_clients(slices))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(engine, slices)

    make = partial(images, "scaffold+wsm", **{"clients.sample": 6})
    with mock.patch.object(VectorizedEngine, "_train_stack", train):
        largest = compare_with_sequential(make, device, execution, rounds=2)
    assert tried == [6, 3] + [1] * 12, f"stacks of {tried} were tried"
    return largest


def large(device: str) -> BuiltExperiment:
    return small_experiment("fedavg", {**LARGE, "device": device})


def peak_memory(make: Any, run: Any) -> int:
    """Bytes that an engine allocates at most while it runs, from an empty cache."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with contextlib.closing(make()) as engine:
        run(engine)
    return torch.cuda.max_memory_allocated()


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """This process gets no more bytes of the GPU than these."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        limit / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def training_out_of_memory(execution: str, device: str) -> float:
    """Memory for two clients but not for eight: the stack is halved, and the result is the same."""
    reference, experiment = large("cpu"), large(device)
    expected = run_rounds(reference, SequentialEngine(reference.task), 2)
    two, eight = (
        peak_memory(
            lambda stack=stack: VectorizedEngine(experiment.task, stack, execution),
            lambda engine: run_rounds(experiment, engine, 1),
        )
        for stack in (2, 8)
    )
    assert eight > 1.5 * two, f"a stack of 2 takes {two} bytes, and one of 8 {eight}"
    engine = VectorizedEngine(experiment.task, 8, execution)
    # aggregation needs all replies at once, beside what captured steps keep
    with memory_limit((two + 3 * eight) // 4), contextlib.closing(engine):
        found = run_rounds(experiment, engine, 2)
        assert engine.stack < 8, "the stack was not halved"
        assert_not_degraded(engine, execution)
    return compare_runs(found, expected)


def evaluation_out_of_memory(device: str) -> float:
    """Examples of a forward pass are halved until they fit; the counts are the same."""
    reference, experiment = large("cpu"), large(device)
    models, expected_models = (
        with_client_models(make_work(each, first_state(each), 1)).start
        for each in (experiment, reference)
    )
    engine = VectorizedEngine(experiment.task, 8, "eager")
    engine.score(models, "test")  # what libraries keep is allocated now
    before = torch.cuda.memory_allocated()
    peak = peak_memory(
        lambda: VectorizedEngine(experiment.task, 8, "eager"),
        lambda other: other.score(models, "test"),
    )
    rows = engine.max_rows
    with memory_limit((before + peak) // 2):
        found = engine.score(models, "test")
    assert engine.max_rows < rows, "the examples of a pass were not halved"
    expected = SequentialEngine(reference.task).score(expected_models, "test")
    assert torch.equal(found.confusion, expected.confusion)
    return difference({"loss": found.loss}, {"loss": expected.loss})


# --------------------------------------------------------------------------------------------- bits


def resume(execution: str, device: str) -> float:
    """Four rounds, and two that are resumed for two more: the same bits in every file."""
    keys = {
        "data.name": "synthetic(samples=300, classes=4, shape='3x18x18')",
        "data.partition": "iid",
        "clients.count": 6,
        "clients.sample": 3,
        "engine": "vectorized",
        "execution": execution,
        "model": "lenet",
        "method": "scaffold+wsm",
        "local.batch_size": 10,
        "local.optimizer": "sgd(lr=0.1, momentum=0.5)",
        "data.augment": ("crop", "flip"),
        "record.local": True,
        "checkpoint.seconds": 0,
        "deterministic": True,
        "threads": 1,
        "device": device,
    }
    four, two = (parse_experiment({}, keys | {"rounds": rounds}) for rounds in (4, 2))
    with tempfile.TemporaryDirectory() as folder, without_tracing(device):
        straight, resumed = Path(folder, "straight"), Path(folder, "resumed")
        start_run(four, straight)
        start_run(two, resumed)
        resume_run(resumed, rounds=4)
        expected, found = contents(straight), contents(resumed)
    assert expected["round"] == 4
    assert found.keys() == expected.keys()
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, f"after resuming, these differ: {', '.join(different)}"
    return 0.0


def same_bits(names: Sequence[str], execution: str, device: str) -> float:
    """Each part twice with deterministic = true. -> 0; the parts whose runs differ are named"""
    wrong: list[str] = []
    for name in names:
        try:
            one, other = (run_twice(fast_config(name), execution, device) for _ in range(2))
            difference(one, other, 0.0)
        except Exception as error:  # the other parts are still run
            wrong.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[0]})")
    assert not wrong, f"not deterministic: {'; '.join(wrong)}"
    return 0.0


def run_twice(method: str, execution: str, device: str) -> Any:
    experiment = images(method, device, deterministic=True, precision="fp32")
    engine = VectorizedEngine(experiment.task, 64, execution)
    with contextlib.closing(engine), without_tracing(device):
        state, lines = run_rounds(experiment, engine, 2)
        assert_not_degraded(engine, execution)
    assert_rounds_succeed(lines)
    return state_tree(state)


def whole_run(device: str) -> float:
    """A run of the experiment with `engine = auto`, and the same by `sequential` on the CPU."""
    keys = {
        **IMAGES,
        "data.partition": "dirichlet(alpha=0.5)",
        "method": "fedprox(mu=0.1)+wsm",
        "model": "mlp(hidden=8)",
        "rounds": 3,
        "precision": "fp64",
        "threads": 1,
        "record.local": True,
        "record.cross": 4,
        "record.examples": True,
    }
    curves = []
    for where, engine in ((device, "auto"), ("cpu", "sequential")):
        with tempfile.TemporaryDirectory() as folder:
            config = parse_experiment({}, {**keys, "device": where, "engine": engine})
            run = start_run(config, Path(folder, "run"))
            columns = {name: run.curve(value=name)[1] for name in ("loss", "train_loss")}
        counts = {name: len(column) for name, column in columns.items()}
        assert counts == {"loss": 3, "train_loss": 3}, f"values: {counts}"
        curves.append({name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()})
    return difference(*curves)


def cases() -> Iterator[Case]:
    for execution in ("eager", "captured"):
        for method in DRIFTING:
            make = partial(drifting, fast_config(method))
            yield Case(
                f"drift, {method}, {execution}",
                partial(compare_with_sequential, make, execution=execution),
            )
        yield Case(f"four runs in one stack, {execution}", partial(sweep, execution), 6)
        yield Case(
            f"out of memory by the engine's seam, {execution}",
            partial(seam_out_of_memory, execution),
        )
        yield Case(
            f"out of memory in training, {execution}",
            partial(training_out_of_memory, execution),
            15,
            ONLY_GPU,
            fresh=True,
        )
        yield Case(f"resume, {execution}", partial(resume, execution), 15, fresh=True)
    yield Case("resume, compiled", partial(resume, "compiled"), 60, fresh=True)
    yield Case("out of memory in evaluation", evaluation_out_of_memory, 15, ONLY_GPU, fresh=True)
    for title, names in (("methods", METHODS), ("other parts", sorted(set(PARTS) - set(METHODS)))):
        for execution in ("eager", "captured"):
            yield Case(
                f"same bits twice, {title}, {execution}",
                partial(same_bits, list(names), execution),
                40,
                fresh=True,
            )
    yield Case("a whole run, engine auto", whole_run, 15)
