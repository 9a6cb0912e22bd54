"""Slow and fast clients, for experiments: when an answer comes, who is waited for, and what becomes
of those who are late.

Time is simulated. A client has a speed for the whole run, an answer takes as long as its local
steps, and all of it is drawn from keys: the same clients are late on every machine. Drop-out is a
matter of `peers/availability.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from remanence.core import expressions, pytree
from remanence.core.errors import InputError, check_range
from remanence.core.rng import Key
from remanence.core.types import ModelState, Reply

# (clients, key of the experiment) -> [K] float64: simulated seconds a local step takes
Speed = Callable[[int, Key], np.ndarray]
# (simulated seconds until each answer [k]) -> simulated seconds after which nobody is waited for
ReplyDeadline = Callable[[np.ndarray], float]


# ----------------------------------------------------------------------------- how fast clients are


def equal(*, seconds: float = 1.0) -> Speed:
    """All clients alike.

    seconds: a local step takes so long.
    """
    check_range(seconds > 0, "speed equal", "seconds", "above 0", seconds)
    return lambda clients, key: np.full(clients, seconds)


def lognormal(*, sigma: float = 0.5) -> Speed:
    """exp(sigma * N(0, 1)) seconds a step: half of the clients take less than one second, and a few
    take very long.

    sigma: standard deviation of the logarithm; with 0.5 the slowest of 100 clients takes about
        three times as long as the median one.
    """
    check_range(sigma >= 0, "speed lognormal", "sigma", "of at least 0", sigma)
    return lambda clients, key: np.exp(sigma * _normal(key.fold_in("speed"), clients))


def classes(*, slow: float = 0.3, factor: float = 5.0) -> Speed:
    """Two kinds of devices: one second a step, or `factor` seconds.

    slow: share of the clients that are slow, chosen at random.
    factor: how many times longer they take.
    """
    check_range(0 <= slow <= 1, "speed classes", "slow", "from 0 to 1", slow)
    check_range(factor >= 1, "speed classes", "factor", "of at least 1", factor)

    def draw(clients: int, key: Key) -> np.ndarray:
        seconds = np.ones(clients)
        seconds[key.fold_in("speed").choice(clients, math.floor(slow * clients + 0.5 + 1e-9))] = (
            factor
        )
        return seconds

    return draw


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
    """When the answers of a round come: steps * seconds a step, times exp(jitter * N(0, 1)).

    clients, steps: [k]; seconds: [K], of all clients; key: the round's -> [k] simulated seconds
    """
    drawn = _normal(
        key.fold_in("jitter"), len(seconds)
    )  # for all clients, so that a draw belongs to a client and not to its place in the round
    return np.asarray(steps * seconds[clients] * np.exp(jitter * drawn[clients]))


def _normal(key: Key, count: int) -> np.ndarray:
    """Box and Muller."""
    radius, angle = key.fold_in("radius").uniform(count), key.fold_in("angle").uniform(count)
    return np.asarray(np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * math.pi * angle))


# -------------------------------------------------------------------------------- who is waited for


def none() -> ReplyDeadline:
    """Everybody is waited for."""
    return lambda times: math.inf


def after(*, seconds: float) -> ReplyDeadline:
    """A round ends after so many simulated seconds."""
    check_range(seconds > 0, "deadline after", "seconds", "above 0", seconds)
    return lambda times: seconds


def quantile(*, share: float = 0.8) -> ReplyDeadline:
    """A round ends when this share of those asked, rounded up, has answered."""
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


def oversample(wanted: int, over_selection: float, available: int) -> int:
    """How many clients are asked where `wanted` answers shall be used: a share more, rounded up, as
    far as there are any.

    >>> oversample(10, 1.3, available=100), oversample(10, 1.1, available=100), oversample(10, 1.3, available=12)
    (13, 11, 12)
    """
    if over_selection < 1 or not math.isfinite(over_selection):
        raise InputError(
            f"round.over_selection={over_selection} would ask fewer clients than are wanted:"
            " give 1 or more, such as 1.3"
        )
    return min(available, math.ceil(wanted * over_selection - 1e-9))


def on_time_mask(times: np.ndarray, wanted: int, deadline: float) -> np.ndarray:
    """The first `wanted` to answer, as far as they answer in time; of equal times, the first in
    order.

    >>> on_time_mask(np.array([3.0, 1.0, 9.0, 2.0]), wanted=3, deadline=2.5).tolist()
    [False, True, False, True]

    times: [k] -> [k] bool
    """
    mask = np.zeros(len(times), dtype=bool)
    mask[np.argsort(times, kind="stable")[:wanted]] = True
    return mask & (times <= deadline)


def round_duration(times: np.ndarray, used: np.ndarray, wanted: int, deadline: float) -> float:
    """How long a round takes: until the last answer that is used or, with fewer than wanted, until
    the deadline; until everybody answered without one.

    >>> round_duration(np.array([3.0, 1.0, 9.0]), np.array([False, True, False]), wanted=2, deadline=2.5)
    2.5

    times: [k]; used: [k] bool
    """
    if not len(times):
        return 0.0
    last = float(times[used].max()) if used.any() else 0.0
    return last if used.sum() >= wanted or used.all() else min(deadline, float(times.max()))


# ------------------------------------------------------------------------- what becomes of the late


def rounds_late(times: np.ndarray, length: float) -> np.ndarray:
    """In how many rounds from its own an answer comes, where rounds take that long: 0 within it, 1
    in the next.

    >>> rounds_late(np.array([2.0, 10.0, 10.5, 31.0]), length=10.0).tolist()
    [0, 0, 1, 3]

    times: [k] -> [k] int64
    """
    if length <= 0:
        return np.zeros(len(times), dtype=np.int64)
    return np.maximum(np.ceil(times / length - 1e-9).astype(np.int64) - 1, 0)


def staleness_weight(age: int, a: float) -> float:
    """1 / (1 + age)^a: what an answer still weighs that is so many rounds old (Xie et al.,
    "Asynchronous federated optimization", 2019).

    >>> staleness_weight(0, a=0.5), staleness_weight(3, a=0.5), staleness_weight(3, a=0)
    (1.0, 0.5, 1.0)
    """
    if age < 0:
        raise ValueError(f"an answer cannot be {age} rounds old")
    return float((1.0 + age) ** -a)


def rebase_stale(late: Reply, began: ModelState, now: ModelState, round: int, a: float) -> Reply:
    """Late answers as answers of this round: the same way from today's model, weighing less.

    What they learned counts from where they began; taken as models, they would pull everything back
    to the past. A model of a single age: call it for each.

    late: replies that all began from `began`; round: this one, from 1
    """
    ages = round - late.round
    shares = torch.tensor(
        [staleness_weight(int(age), a) for age in ages.tolist()],
        dtype=late.weight.dtype,
        device=late.weight.device,
    )
    moved = pytree.add(late.delta(began), pytree.select_keys(now.params, late.params))
    return late._replace(
        params=moved, round=torch.full_like(late.round, round), weight=late.weight * shares
    )


def merge_stale(replies: Reply | None, late: Reply | None) -> Reply | None:
    """Answers in time and late ones together, in the order of clients; of a client that gives
    both, the one in time counts.
    """
    if replies is None or late is None:
        return late if replies is None else replies
    news = (~torch.isin(late.client, replies.client)).nonzero().flatten()
    joined = Reply.concat([replies, late.select(news)])
    return joined.select(torch.argsort(joined.client))
