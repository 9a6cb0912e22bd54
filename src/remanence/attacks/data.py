"""Attacks on the rows a client trains on: wrong labels, and a backdoor.

The backdoor is that of Gu, Dolan-Gavitt and Garg, "BadNets", 2017: a mark in a corner makes any
example belong to the target class, and everything else stays as it was, so that accuracy shows
nothing.
"""

from __future__ import annotations

import numpy as np

from remanence.attacks.attack import Attack, DataInfo, parse_attackers
from remanence.core.errors import InputError, check_range
from remanence.core.rng import Key

WORDS = ("next", "reverse", "random")


def label_flip(
    *, fraction: float = 0.1, clients: str = "", of: int = -1, to: str = "next"
) -> Attack:
    """Trains on wrong labels.

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    of: the class whose labels are changed; -1: all.
    to: next (c + 1, the last becomes 0), reverse (C - 1 - c), random (any other class), or the
        number of a class.
    """
    check_range(of >= -1, "attack label_flip", "of", "of at least -1", of)
    if to not in WORDS and not (to.isascii() and to.isdigit() and len(to) < 10):
        raise InputError(
            f"attack label_flip: cannot read to={to!r}: write {', '.join(WORDS)} or the number"
            " of a class"
        )
    if to == str(of):
        raise InputError(
            f"attack label_flip: of={of} and to={to} are the same class: give another one"
        )

    def check(known: DataInfo, shape: tuple[int, ...]) -> None:
        for number in (of, int(to) if to.isdigit() else 0):
            if number >= known.classes:
                raise InputError(
                    f"attack label_flip: there is no class {number}: classes are numbered 0 to"
                    f" {known.classes - 1}"
                )

    def alter(
        x: np.ndarray, y: np.ndarray, known: DataInfo, key: Key
    ) -> tuple[np.ndarray, np.ndarray]:
        return x, np.where((y == of) | (of < 0), _relabel(y, to, known.classes, key), y).astype(
            np.int64
        )

    def show_success(
        x: np.ndarray, y: np.ndarray, known: DataInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Test rows of the class whose labels are changed, with the label they shall get."""
        chosen = np.flatnonzero(y == of)
        return x[chosen], _relabel(y[chosen], to, known.classes, Key(0))

    aimed = of >= 0 and to != "random"
    who = parse_attackers("label_flip", fraction, clients)
    return Attack(
        "label_flip", who, poison=alter, check=check, measure=show_success if aimed else None
    )


def _relabel(y: np.ndarray, to: str, classes: int, key: Key) -> np.ndarray:
    if to == "next":
        return (y + 1) % classes
    if to == "reverse":
        return classes - 1 - y
    if to == "random":
        return (
            y
            + 1
            + (key.fold_in("label_flip").bits(len(y)) % np.uint64(classes - 1)).astype(np.int64)
        ) % classes
    return np.full_like(y, int(to))


def backdoor(
    *, fraction: float = 0.1, clients: str = "", target: int = 0, size: int = 3, share: float = 0.5
) -> Attack:
    """Stamps a mark on a share of its rows and labels them as the target class.

    The mark: in images a square of the brightest value in the lower right corner; in tables the
    largest value there is in each of the last features.

    fraction: share of the clients that attack.
    clients: their numbers instead, such as "3 7".
    target: the class that marked examples shall belong to.
    size: side of the square in pixels, or number of features.
    share: of an attacker's rows, at least one.
    """
    check_range(target >= 0, "attack backdoor", "target", "of at least 0", target)
    check_range(size >= 1, "attack backdoor", "size", "of at least 1", size)
    check_range(0 < share <= 1, "attack backdoor", "share", "above 0 and at most 1", share)

    def check(known: DataInfo, shape: tuple[int, ...]) -> None:
        if known.kind == "tokens":
            raise InputError(
                "attack backdoor: marks are for images and tables, and these data are tokens:"
                " use label_flip"
            )
        if target >= known.classes:
            raise InputError(
                f"attack backdoor: there is no class {target}: classes are numbered 0 to"
                f" {known.classes - 1}"
            )
        room = min(shape[-2:]) if known.kind == "image" else shape[0]
        if size > room:
            raise InputError(
                f"attack backdoor: a mark of size {size} does not fit into examples of shape"
                f" {shape}: give at most {room}"
            )

    def alter(
        x: np.ndarray, y: np.ndarray, known: DataInfo, key: Key
    ) -> tuple[np.ndarray, np.ndarray]:
        chosen = key.fold_in("backdoor").choice(len(y), min(len(y), max(1, round(share * len(y)))))
        x, y = x.copy(), y.copy()
        x[chosen], y[chosen] = stamp(x[chosen], size, known), target
        return x, y

    def show_success(
        x: np.ndarray, y: np.ndarray, known: DataInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Test rows of all other classes, marked, with the target as label: accuracy on them is
        the rate of success.
        """
        others = np.flatnonzero(y != target)
        return stamp(x[others], size, known), np.full(len(others), target, dtype=np.int64)

    return Attack(
        "backdoor",
        parse_attackers("backdoor", fraction, clients),
        poison=alter,
        check=check,
        measure=show_success,
    )


def stamp(x: np.ndarray, size: int, known: DataInfo) -> np.ndarray:
    """Examples with the mark. x: [n, ...] -> the same shape

    >>> stamp(np.zeros((1, 1, 2, 3), np.uint8), 1, DataInfo("image", 2, np.array(16))).tolist()
    [[[[0, 0, 0], [0, 0, 16]]]]
    """
    marked = x.copy()
    if known.kind == "image":
        marked[..., -size:, -size:] = known.high
    else:
        marked[:, -size:] = known.high[-size:]
    return marked
