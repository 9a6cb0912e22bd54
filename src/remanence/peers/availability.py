"""Availability: which clients are online in a round. Each constructor returns a pure function of
the round's key, and says it of the clients it is asked about, however many others there are.

A client that is offline does not train in that round and keeps its model and state. Joined by `+`,
a client is online if it is online by all parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.rng import Key

# (clients [k], number of all clients, round, key of the round) -> [k] bool: online?
Availability = Callable[[np.ndarray, int, int, Key], np.ndarray]


def always() -> Availability:
    """All clients are online in every round."""
    return lambda clients, total, round, key: np.ones(len(clients), dtype=bool)


def random(*, offline: float = 0.1) -> Availability:
    """In every round each client is offline with probability `offline`, independently.

    Args:
        offline: Probability of being offline.
    """
    if not 0 <= offline < 1:
        raise InputError(f"availability random: offline is a probability below 1, not {offline}")
    return lambda clients, total, round, key: (
        key.fold_in("availability").uniform(clients) >= offline
    )


def never(*, clients: PlainText = "") -> Availability:
    """These clients, by number ("3 7"), are never online.

    Args:
        clients: Numbers of the clients.
    """
    numbers = [int(number) for number in re.findall(r"\d{1,9}", clients)]
    if not numbers or not re.fullmatch(r"[\d\s,]+", clients):
        raise InputError(
            f"availability never: cannot read clients={clients!r}: write the numbers of the"
            " clients, such as '3 7'"
        )

    def online(clients: np.ndarray, total: int, round: int, key: Key) -> np.ndarray:
        if max(numbers) >= total:
            raise InputError(
                f"availability never: there is no client {max(numbers)}: clients are numbered"
                f" 0 to {total - 1}"
            )
        return np.isin(clients, numbers, invert=True)

    return online


def every(*, rounds: int = 2) -> Availability:
    """Client k is online in the rounds r with r mod `rounds` = k mod `rounds`.

    Args:
        rounds: Rounds from one in which a client is online to the next.
    """
    if rounds < 1:
        raise InputError(f"availability every: rounds must be at least 1, not {rounds}")
    return lambda clients, total, round, key: clients % rounds == round % rounds


AVAILABILITIES: dict[str, Callable[..., Availability]] = {
    "always": always,
    "every": every,
    "never": never,
    "random": random,
}


def parse_availability(text: str) -> Availability:
    """Parse an availability such as `random(offline=0.1)+never(clients="3")`."""
    parts: list[Availability] = [
        expressions.instantiate(call, AVAILABILITIES, "availability")
        for call in expressions.parse_parts(text)
    ]
    return lambda clients, total, round, key: np.logical_and.reduce(
        [part(clients, total, round, key) for part in parts]
    )
