"""What a case of the GPU suite is, the list of all cases, and what they share.

A case is a function of a device. It returns the largest difference from its reference, relative to
the larger of 1 and the value, and raises an AssertionError where that is too large. On the device
"cpu" the same functions run with eager steps in place of captured and compiled ones: that tests the
cases, not the GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from remanence.core import pytree
from remanence.engines import captured_steps
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import max_rel_diff, run_rounds, state_tree
from remanence.training import server_capture
from remanence.training.state import RunState

# In float64. Engines agree to 1e-12 on a CPU; on a GPU other sums, and Adam, which divides by roots
# of small numbers, leave less.
TOLERANCE = 1e-9

# (device) -> the experiment on it
Make = Callable[[str], BuiltExperiment]

MODULES = ("compiled_cases", "run_cases", "kernel_cases", "evaluation_cases", "engine_cases")


class Case(NamedTuple):
    """A case of the suite.

    Attributes:
        name: What is tested; unique.
        check: (device) -> the largest difference.
        seconds: An estimate for an H200: the longest begin first.
        needs_gpu: Why it has no meaning on a CPU; "" where it has.
        fresh: Whether it needs a process in which nothing ran before.
        dtype: In which it computes.
    """

    name: str
    check: Callable[[str], float]
    seconds: float = 3
    needs_gpu: str = ""
    fresh: bool = False
    dtype: str = "float64"


def all_cases() -> list[Case]:
    """All cases of the suite, the longest first."""
    found = [case for name in MODULES for case in importlib.import_module(f"gpu.{name}").cases()]
    return sorted(found, key=lambda case: -case.seconds)


def on_cpu(tree: Any) -> Any:
    """The same tree, with its tensors on the CPU."""
    return pytree.map(Tensor.cpu, tree)


def difference(found: Any, expected: Any, tolerance: float = TOLERANCE, what: str = "") -> float:
    """The largest difference of two trees; raises an AssertionError above the tolerance."""
    place, distance = max_rel_diff(on_cpu(found), on_cpu(expected))
    assert distance <= tolerance, (
        f"{what or 'it'} differs from the reference by {distance:.1e} at {place},"
        f" and {tolerance:.0e} is allowed"
    )
    return distance


def compare_runs(
    found: tuple[RunState, list[dict[str, Any]]],
    expected: tuple[RunState, list[dict[str, Any]]],
    tolerance: float = TOLERANCE,
) -> float:
    """The largest difference of two runs, each a state and its lines of metrics."""
    assert_rounds_succeed(found[1])
    for line, other in zip(found[1], expected[1], strict=True):
        # in a lower precision an example between two classes may change sides
        assert tolerance > TOLERANCE or line["per_class"] == other["per_class"], (
            f"predictions differ in round {line['round']}"
        )
    return difference(state_tree(found[0]), state_tree(expected[0]), tolerance, "the state")


def assert_rounds_succeed(lines: list[dict[str, Any]]) -> None:
    """Raise an AssertionError where a client was rejected or a round's aggregation failed."""
    for line in lines:
        failed = line["rejected"] or line["abandoned"]
        assert not failed, f"round {line['round']} failed: {line}"


def compare_with_sequential(
    make: Make,
    device: str,
    execution: str,
    rounds: int = 3,
    stack: int = 64,
    tolerance: float = TOLERANCE,
) -> float:
    """Run the engine `vectorized` on the device and `sequential` on the CPU, and compare.

    Args:
        make: Makes the experiment for a device.
        device: Of the engine `vectorized`.
        execution: How its steps run. Falling back to eager steps is a failure.
        rounds: How many to run.
        stack: The most clients trained together.
        tolerance: The largest difference allowed.
    """
    reference = make("cpu")
    expected = run_rounds(reference, SequentialEngine(reference.task), rounds)
    experiment = make(device)
    with (
        without_tracing(device),
        contextlib.closing(VectorizedEngine(experiment.task, stack, execution)) as engine,
    ):
        found = run_rounds(experiment, engine, rounds)
        assert_not_degraded(engine, execution)
    return compare_runs(found, expected, tolerance)


def assert_not_degraded(engine: VectorizedEngine, execution: str) -> None:
    """Raise an AssertionError where the engine ran otherwise than was requested."""
    assert engine.degraded_reason == "", engine.degraded_reason
    assert engine.execution == execution
    compiled = {shape for each in engine.captured for shape in each.compiled}
    assert bool(engine.captured) == (execution != "eager")
    assert bool(compiled) == (execution == "compiled"), "no step was compiled"


@contextlib.contextmanager
def without_tracing(device: str) -> Iterator[None]:
    """On a CPU steps are neither traced nor compiled, which takes seconds for each form."""
    if device != "cpu":
        yield
        return

    def leave(function: Any, example: Any, compile: bool = False) -> Any:
        return function

    with (
        mock.patch.object(captured_steps, "TracedFunction", leave),
        mock.patch.object(server_capture, "TracedFunction", leave),
    ):
        yield


@contextlib.contextmanager
def counted(
    owner: Any, name: str, keep: Callable[..., Any] = lambda *args: None
) -> Iterator[list[Any]]:
    """Count the calls of a function, so that a case can show that it reached it.

    Args:
        owner: The module or class through which it is called.
        name: Its name there.
        keep: What to keep of a call's arguments; no tensors, whose memory could then not be used
            again, as it is without the count.

    Yields:
        What was kept of each call.
    """
    original, calls = getattr(owner, name), list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(keep(*args))
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield calls


def evaluate_as_on_gpu(engine: VectorizedEngine) -> VectorizedEngine:
    """On a CPU, evaluate by the path that a GPU takes; on a GPU nothing changes."""
    engine.cuda = engine.use_kernels = True
    return engine


def synchronize(device: str) -> None:
    """Wait for the GPU, so that an error belongs to the case that caused it."""
    if device != "cpu":
        torch.cuda.synchronize(device)
