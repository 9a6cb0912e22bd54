"""Simulated speeds of clients, and deadlines for their replies.

Time is simulated and drawn from keys: a client has a speed for the whole run, a reply takes as long
as the client's local steps, and the same clients are late on every machine. What becomes of late
replies is in `rounds/stragglers.py`; which clients are online is in `peers/availability.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from remanence.core import expressions
from remanence.core.ranges import check_range
from remanence.core.rng import Key

# (clients, key of the experiment) -> [K] float64: simulated seconds of a local step
Speed = Callable[[int, Key], np.ndarray]
# (simulated seconds until each reply [k]) -> simulated seconds after which a round ends
ReplyDeadline = Callable[[np.ndarray], float]


def equal(*, seconds: float = 1.0) -> Speed:
    """All clients are equally fast.

    Args:
        seconds: Duration of a local step.
    """
    check_range(seconds > 0, "speed equal", "seconds", "above 0", seconds)
    return lambda clients, key: np.full(clients, seconds)


def lognormal(*, sigma: float = 0.5) -> Speed:
    """exp(sigma * N(0, 1)) seconds a step: half of the clients take less than one second, and a few
    take very long.

    Args:
        sigma: Standard deviation of the logarithm; with 0.5 the slowest of 100 clients takes about
            three times as long as the median one.
    """
    check_range(sigma >= 0, "speed lognormal", "sigma", "of at least 0", sigma)
    return lambda clients, key: np.exp(sigma * _normal(key.fold_in("speed"), clients))


def classes(*, slow: float = 0.3, factor: float = 5.0) -> Speed:
    """Two kinds of devices: one second a step, or `factor` seconds.

    Args:
        slow: Share of the clients that are slow, chosen at random.
        factor: How many times longer they take.
    """
    check_range(0 <= slow <= 1, "speed classes", "slow", "from 0 to 1", slow)
    check_range(factor >= 1, "speed classes", "factor", "of at least 1", factor)

    def sample(clients: int, key: Key) -> np.ndarray:
        seconds = np.ones(clients)
        count = math.floor(slow * clients + 0.5 + 1e-9)
        seconds[key.fold_in("speed").choice(clients, count)] = factor
        return seconds

    return sample


SPEEDS: dict[str, Callable[..., Speed]] = {
    "classes": classes,
    "equal": equal,
    "lognormal": lognormal,
}


def parse_speed(text: str) -> Speed:
    """`lognormal(sigma=0.5)`

    >>> parse_speed("classes(slow=0.5, factor=5)")(2, Key(0)).tolist()
    [1.0, 5.0]
    """
    speed: Speed = expressions.instantiate(expressions.parse_call(text), SPEEDS, "speed")
    return speed


def response_times(
    clients: np.ndarray, steps: np.ndarray, seconds: np.ndarray, key: Key, jitter: float = 0.1
) -> np.ndarray:
    """When the replies of a round arrive: steps * seconds a step * exp(jitter * N(0, 1)).

    Args:
        clients: [k], of the round.
        steps: [k] local steps.
        seconds: [K] simulated seconds of a local step, of all clients.
        key: The round's.
        jitter: Standard deviation of the logarithm.

    Returns:
        [k] simulated seconds.
    """
    # at the clients' numbers, so that a draw belongs to a client and not to its place in the round
    noise = _normal(key.fold_in("jitter"), clients)
    return np.asarray(steps * seconds[clients] * np.exp(jitter * noise))


def _normal(key: Key, count: int | np.ndarray) -> np.ndarray:
    """Standard normal numbers, by Box and Muller; with an array, those at these positions."""
    radius, angle = key.fold_in("radius").uniform(count), key.fold_in("angle").uniform(count)
    return np.asarray(np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * math.pi * angle))


def none() -> ReplyDeadline:
    """A round waits for every reply."""
    return lambda times: math.inf


def after(*, seconds: float) -> ReplyDeadline:
    """A round ends after a fixed simulated time.

    Args:
        seconds: Simulated seconds.
    """
    check_range(seconds > 0, "deadline after", "seconds", "above 0", seconds)
    return lambda times: seconds


def quantile(*, share: float = 0.8) -> ReplyDeadline:
    """A round ends when a share of the sampled clients has replied.

    Args:
        share: Of the sampled clients; their number is rounded up.
    """
    check_range(0 < share <= 1, "deadline quantile", "share", "above 0 and at most 1", share)
    return lambda times: (
        float(np.sort(times)[math.ceil(share * len(times) - 1e-9) - 1]) if len(times) else 0.0
    )


DEADLINES: dict[str, Callable[..., ReplyDeadline]] = {
    "after": after,
    "none": none,
    "quantile": quantile,
}


def parse_deadline(text: str) -> ReplyDeadline:
    """`after(seconds=30)`, `quantile(share=0.8)` or `none`; a plain number means seconds.

    >>> parse_deadline("quantile(share=0.5)")(np.array([4.0, 1.0, 2.0, 9.0]))
    2.0
    >>> parse_deadline("30")(np.array([4.0]))
    30.0
    """
    try:
        call = expressions.Call("after", {"seconds": float(text)})
    except ValueError:
        call = expressions.parse_call(text)
    deadline: ReplyDeadline = expressions.instantiate(call, DEADLINES, "deadline")
    return deadline
