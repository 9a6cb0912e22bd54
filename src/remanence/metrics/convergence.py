"""Convergence: rounds to a target, summaries of an accuracy curve, and accuracy against cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from remanence.core.errors import InputError

if TYPE_CHECKING:
    from remanence.results.run import Run

Curve = tuple[Sequence[int], Sequence[float]]  # rounds and values, as `run.curve()` gives them


@dataclass(frozen=True)
class RoundsToTarget:
    """The rounds in which each method reached fractions of one target; None where it did not."""

    target: float
    fractions: tuple[float, ...]
    rounds: dict[str, tuple[int | None, ...]]  # by method, one for each fraction


class CostCurve(NamedTuple):
    """Accuracy against the accumulated cost."""

    round: np.ndarray  # [n] evaluated rounds
    cost: np.ndarray  # [n] sum over all rounds up to this one
    accuracy: np.ndarray  # [n]


def rounds_to(rounds: Sequence[int], values: Sequence[float], target: float) -> int | None:
    """The first recorded round whose value is at least the target; None if there is none.

    >>> rounds_to([5, 10, 15], [0.25, 0.5, 0.75], 0.5), rounds_to([5, 10], [0.25, 0.5], 0.75)
    (10, None)
    """
    reached = [int(round) for round, value in zip(rounds, values, strict=True) if value >= target]
    return min(reached, default=None)


def rounds_to_fractions(
    curves: Mapping[str, Curve], fractions: Sequence[float] = (0.75, 0.9, 1.0), of: float = 0.95
) -> RoundsToTarget:
    """Rounds to fractions of a target that is common to all methods: `of` times the best value that
    any of them reached (Flashback, table 1).

    The best value is 1, so the target is 0.95, and three quarters of it are 0.7125:

    >>> rounds_to_fractions({"a": ([1, 2], [0.75, 1.0]), "b": ([1, 2], [0.5, 0.75])}).rounds
    {'a': (1, 2, 2), 'b': (2, None, None)}
    """
    target = of * top([value for _, values in curves.values() for value in values])
    wanted = tuple(float(fraction) for fraction in fractions)
    found = {
        name: tuple(rounds_to(rounds, values, part * target) for part in wanted)
        for name, (rounds, values) in curves.items()
    }
    return RoundsToTarget(target, wanted, found)


def top(values: Sequence[float]) -> float:
    """The best value, without NaN; NaN if there is none.

    >>> top([0.5, 0.75, float("nan")])
    0.75
    """
    return max((float(value) for value in _known(values)), default=float("nan"))


def last(values: Sequence[float]) -> float:
    """The value of the last recorded round.

    >>> last([0.5, 0.75, 0.25])
    0.25
    """
    return float(values[-1]) if len(values) else float("nan")


def mean_of_last(values: Sequence[float], n: int) -> float:
    """The mean of the last n recorded values, or of all if there are fewer.

    >>> mean_of_last([0.0, 0.5, 0.25], 2)
    0.375
    """
    if n < 1:
        raise InputError(f"the mean of the last {n} rounds is not defined: use one or more")
    known = _known(values)[-n:]
    return float(known.mean()) if len(known) else float("nan")


def time_averaged(rounds: Sequence[int], values: Sequence[float], start: int = 0) -> float:
    """The mean over all rounds after `start`; a recorded value counts for every round since the
    previous record.

    With equal distances this is the plain mean (FedWAvg's "average"). Here 0.5 counts for rounds 1
    to 3 and 1.0 for round 4:

    >>> time_averaged([3, 4], [0.5, 1.0])
    0.625
    """
    when, numbers = np.asarray(rounds, dtype=float), np.asarray(values, dtype=float)
    known = ~np.isnan(numbers)
    lengths = np.diff(when[known], prepend=float(start))
    return (
        float((lengths * numbers[known]).sum() / lengths.sum())
        if lengths.sum() > 0
        else float("nan")
    )


def accuracy_per_bytes(run: Run) -> CostCurve:
    """Test accuracy of the primary model against the bytes sent so far in both directions."""
    return _accuracy_against(
        run, lambda line: float(line.get("bytes_up") or 0) + float(line.get("bytes_down") or 0)
    )


def accuracy_per_seconds(run: Run) -> CostCurve:
    """Test accuracy of the primary model against the seconds of all rounds so far."""
    return _accuracy_against(run, lambda line: float(line.get("seconds") or 0))


def _accuracy_against(run: Run, cost_of: Callable[[dict[str, Any]], float]) -> CostCurve:
    """The lines of a round, one for each split, repeat its cost, which counts once."""
    model = run.metadata.get("evaluated", "global")
    costs: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    for line in run.metrics:
        round = int(line["round"])
        costs[round] = max(costs.get(round, 0.0), cost_of(line))
        if line["split"] == "test" and line["model"] == model and line.get("accuracy") is not None:
            accuracy[round] = float(line["accuracy"])
    rounds = np.array(sorted(accuracy), dtype=np.int64)
    everything = np.array(sorted(costs), dtype=np.int64)
    spent = np.cumsum([costs[int(round)] for round in everything])
    return CostCurve(
        rounds,
        spent[np.searchsorted(everything, rounds)],
        np.array([accuracy[int(round)] for round in rounds]),
    )


def _known(values: Sequence[float]) -> np.ndarray:
    numbers = np.asarray(values, dtype=float)
    return np.asarray(numbers[~np.isnan(numbers)])
