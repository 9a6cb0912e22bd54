"""Kill points: a line of our own code at which the process is killed as by SIGKILL, drawn from all
lines that a run executes, for each phase.

A run is a function of its experiment, so the n-th line of a phase is always the same: its number
reproduces a failure.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import remanence

SOURCE = str(Path(remanence.__file__).parent) + os.sep
# the phase of a line by its file; the first match counts, searched from the innermost frame
# outwards
PLACES = {
    "checkpoint": (
        "results/checkpoint.py",
        "results/checkpoint_codec.py",
        "results/manifest.py",
        "core/files.py",
        "core/safe_path.py",
        "core/temporary_files.py",
    ),
    "record": (
        "rounds/evaluator.py",
        "rounds/peer_evaluator.py",
        "rounds/writer.py",
        "metrics/",
        "results/ledger.py",
        "results/summary.py",
    ),
    "gate and server": (
        "training/gate.py",
        "training/reply_schema.py",
        "training/server_step.py",
        "rounds/clustered.py",
        "rounds/decentralized.py",
        "rounds/early_stopping.py",
        "rounds/federated.py",
        "rounds/peer_averaging.py",
        "aggregators/",
        "rounds/stragglers.py",
        "rounds/replies.py",
    ),
    "training": (
        "training/client_step.py",
        "training/client_ops.py",
        "training/loss.py",
        "engines/",
        "kernels/",
        "optimizers/",
        "losses/",
        "methods/",
        "privacy/",
        "data/batches.py",
        "rounds/loop.py",
    ),
    "report": ("reports/",),
}
SCORING = {"score", "score_rows", "score_pairs", "tell_success"}

Work = Callable[[], object]


def phase_of(frame: FrameType) -> str:
    """The phase of a line of our code; empty for lines outside all phases."""
    name = frame.f_code.co_filename.removeprefix(SOURCE)
    if frame.f_code.co_name in SCORING:
        return "evaluation"
    return next((phase for phase, places in PLACES.items() if name.startswith(places)), "")


def count_lines(work: Work) -> Counter[str]:
    """How many lines of each phase the work executes."""
    counts: Counter[str] = Counter()
    _trace(work, lambda phase: counts.update((phase,)))
    return counts


def kill_at(work: Work, phase: str, number: int) -> None:
    """Do the work, and kill this process at a given line of a phase."""
    left = number

    def count(here: str) -> None:
        nonlocal left
        if here == phase:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    _trace(work, count)


def _trace(work: Work, see: Callable[[str], None]) -> None:
    known: dict[Any, str] = {}

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        phase = known.setdefault(frame.f_code, phase_of(frame))
        if not phase:
            return None

        def step(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                see(phase)
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)


def in_child(work: Work) -> Any:
    """Run work in a forked process, which skips the clean-up of the test runner."""

    def live() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            work()
        finally:
            os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=live)
    child.start()
    return child


def killed(work: Work, phase: str, number: int) -> bool:
    """Run the work in a child that is killed at a given line of a phase. Returns whether it was
    killed.
    """
    child = in_child(lambda: kill_at(work, phase, number))
    child.join()
    return bool(child.exitcode == -signal.SIGKILL)


def draw_points(
    counts: Counter[str], phases: tuple[str, ...], each: int, seed: int
) -> list[tuple[str, int]]:
    """The same number of points in every phase, evenly over its lines."""
    draw = random.Random(seed)
    return [(phase, draw.randrange(counts[phase])) for phase in phases for _ in range(each)]
