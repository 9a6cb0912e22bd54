"""What the local training of a command costs, from measured steps and starts. `autotune.py` decides
with it what to measure and what to take.

A command may have several runs, of one method or of several. Each run starts an engine of its own;
compiled steps are compiled once for each method and then found in torch's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

# A candidate that takes at most this many times as long as the cheapest is as good: smaller
# differences are noise. The first one tried is taken, which is the simplest.
TIE = 1.05
# Starting with steps that torch's cache has, as a share of compiling them: 4 s instead of 43 for
# job B's CNN, 3 instead of 35 for a LeNet (CPU seconds of one core).
FOUND_AGAIN = 0.1

EngineKey = TypeVar("EngineKey")


class Workload(NamedTuple):
    """What a command trains with one choice of the engine.

    Args:
        rounds: Of all its runs together.
        runs: How many runs.
        methods: How many different methods these have.
    """

    rounds: int = 1
    runs: int = 1
    methods: int = 1


class Timing(NamedTuple):
    """A candidate, as measured.

    Args:
        step_s: Seconds for a local step of one client.
        start_s: Seconds that the first call takes longer: starting, tracing, compiling.
        compiles: Whether torch's cache has the steps when they are needed again.
    """

    step_s: float
    start_s: float = 0.0
    compiles: bool = False

    def total_s(self, steps: float, workload: Workload) -> float:
        """Seconds from now on, after it was measured once.

        Args:
            steps: Local steps of all clients in all runs.
            workload: The runs.
        """
        if self.compiles:
            starts = workload.methods - 1 + FOUND_AGAIN * workload.runs
        else:
            starts = workload.runs
        return steps * self.step_s + starts * self.start_s


class Expected(NamedTuple):
    """What is expected of an execution before it is measured.

    Args:
        speedup: How many times as fast as the best so far.
        start_s: Seconds to start.
        start_s_per_tensor: The same for each parameter tensor of the network.
        saves_s: The most that it saves of a step, in seconds.
    """

    speedup: float
    start_s: float
    start_s_per_tensor: float
    saves_s: float = math.inf

    def to_timing(self, best_step_s: float, tensors: int, compiles: bool) -> Timing:
        start_s = self.start_s + self.start_s_per_tensor * tensors
        step_s = max(best_step_s / self.speedup, best_step_s - self.saves_s)
        return Timing(step_s, start_s, compiles)


# By type of device and execution; worker processes are those for stacks. `benchmarks/choices.py`
# checks these numbers. On two cores a step takes, in ms, eagerly, captured and compiled: .59, .23
# and .17 (MLP), .96, .74 and .49 (LeNet), 16.4, 15.1 and 16.4 (CNN); capturing saves what Python
# takes. Compiling a LeNet takes 35 s there, a ResNet-18 four minutes. On one H200, in bf16, a step
# takes .19, .022 and .017 ms (LeNet), .86, .20 and .12 (CNN), 5.2, 4.1 and 1.3 (ResNet-18); to
# start takes .1, .1 and 1.8 s captured, and 14, 8 and 74 s compiled.
EXPECTED: dict[tuple[str, str], Expected] = {
    ("cpu", "captured"): Expected(2.0, 0.3, 0.05, saves_s=0.3e-3),
    ("cpu", "processes"): Expected(1.5, 1.0, 0.0),
    ("cpu", "compiled"): Expected(1.3, 10.0, 4.0),
    ("cuda", "captured"): Expected(3.0, 0.1, 0.03),
    ("cuda", "compiled"): Expected(2.0, 5.0, 1.1),
}


def may_pay(
    best_total_s: float, expected: Timing, trial_steps: float, steps: float, workload: Workload
) -> bool:
    """Whether measuring an execution, and then using it, is expected to take less time than the
    best candidate so far.

    Args:
        best_total_s: Of that candidate.
        expected: Of the execution.
        trial_steps: Local steps that measuring it takes.
        steps: Local steps of the command.
        workload: The runs of the command.

    >>> lenet = EXPECTED["cpu", "compiled"].to_timing(0.75e-3, tensors=10, compiles=True)
    >>> [may_pay(steps * 0.75e-3, lenet, 400, steps, Workload()) for steps in (100_000, 500_000)]
    [False, True]
    """
    measuring = expected.start_s + trial_steps * expected.step_s
    return measuring + expected.total_s(steps, workload) < best_total_s


def take_simplest(costs: Mapping[EngineKey, float]) -> EngineKey:
    """The first candidate within `TIE` of the cheapest. costs: from the simplest candidate on

    >>> take_simplest({"eager": 3.0, "captured": 1.04, "compiled": 1.0})
    'captured'
    """
    return next(each for each, cost in costs.items() if cost <= TIE * min(costs.values()))
