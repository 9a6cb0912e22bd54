"""Learning rate schedules: a factor of the optimizer's learning rate for each round."""

from __future__ import annotations

import math
from collections.abc import Callable

from remanence.core.ranges import check_range

LrSchedule = Callable[[int, int], float]  # (round from 1, rounds in all) -> factor


def constant() -> LrSchedule:
    """A constant learning rate."""
    return lambda round, rounds: 1.0


def exponential(*, decay: float = 0.99) -> LrSchedule:
    """decay ** (round - 1); FedNTD uses .99.

    Args:
        decay: Factor from one round to the next.
    """
    check_range(0 < decay <= 1, "exponential", "decay", "above 0, at most 1", decay)
    return lambda round, rounds: decay ** (round - 1)


def step(*, every: int, factor: float = 0.1) -> LrSchedule:
    """Multiplied by `factor` every `every` rounds.

    Args:
        every: Rounds between two changes.
        factor: Factor of each change.
    """
    check_range(every >= 1, "step", "every", "of at least 1", every)
    check_range(0 < factor <= 1, "step", "factor", "above 0, at most 1", factor)
    return lambda round, rounds: factor ** ((round - 1) // every)


def cosine(*, final: float = 0.0) -> LrSchedule:
    """Half a cosine from 1 in the first round to `final` in the last.

    Args:
        final: Fraction of the learning rate in the last round.
    """
    check_range(0 <= final <= 1, "cosine", "final", "from 0 to 1", final)
    return lambda round, rounds: (
        final + (1 - final) * (1 + math.cos(math.pi * (round - 1) / max(1, rounds - 1))) / 2
    )


def warmup(*, rounds: int = 5) -> LrSchedule:
    """Rises linearly over the first rounds, then stays constant.

    Args:
        rounds: Rounds until the full learning rate.
    """
    check_range(rounds >= 1, "warmup", "rounds", "of at least 1", rounds)
    return lambda round, _: min(1.0, round / rounds)
