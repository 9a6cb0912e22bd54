"""Attacks on the examples that a client trains on: wrong labels, and a backdoor.

The backdoor is that of Gu, Dolan-Gavitt and Garg, "BadNets", 2017: a trigger in a corner makes the
model predict the target class, and other examples are unchanged, so that accuracy does not show it.
"""

from __future__ import annotations

import numpy as np

from remanence.attacks.attack import Attack, DataInfo, parse_attackers
from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.ranges import check_range
from remanence.core.rng import Key

LABEL_RULES = ("next", "reverse", "random")


def label_flip(
    *, fraction: float = 0.1, clients: PlainText = "", of: int = -1, to: PlainText = "next"
) -> Attack:
    """Trains on wrong labels.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        of: the class whose labels are changed; -1: all.
        to: next (c + 1, the last becomes 0), reverse (C - 1 - c), random (any other class), or the
            number of a class.
    """
    check_range(of >= -1, "attack label_flip", "of", "of at least -1", of)
    if to not in LABEL_RULES and not (to.isascii() and to.isdigit() and len(to) < 10):
        raise InputError(
            f"attack label_flip: cannot read to={to!r}: write {', '.join(LABEL_RULES)} or the"
            " number of a class"
        )
    if to.isdigit() and int(to) == of:
        raise InputError(
            f"attack label_flip: of={of} and to={to} are the same class: give another one"
        )

    def check(info: DataInfo, shape: tuple[int, ...]) -> None:
        for number in (of, int(to) if to.isdigit() else 0):
            if number >= info.classes:
                raise InputError(
                    f"attack label_flip: there is no class {number}: classes are numbered 0 to"
                    f" {info.classes - 1}"
                )
        if to == "reverse" and 2 * of == info.classes - 1:
            raise InputError(
                f"attack label_flip: to=reverse leaves class {of} of {info.classes} as it is: give"
                " the number of another class"
            )

    def poison(
        x: np.ndarray, y: np.ndarray, info: DataInfo, key: Key
    ) -> tuple[np.ndarray, np.ndarray]:
        return x, np.where((y == of) | (of < 0), _relabel(y, to, info.classes, key), y).astype(
            np.int64
        )

    def success_examples(
        x: np.ndarray, y: np.ndarray, info: DataInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the test examples of the attacked class, with the wrong label as target."""
        chosen = np.flatnonzero(y == of)
        return x[chosen], _relabel(y[chosen], to, info.classes, Key(0))

    targeted = of >= 0 and to != "random"
    who = parse_attackers("label_flip", fraction, clients)
    return Attack(
        "label_flip",
        who,
        poison=poison,
        check=check,
        measure=success_examples if targeted else None,
    )


def _relabel(y: np.ndarray, to: str, classes: int, key: Key) -> np.ndarray:
    """Return the wrong label of each example."""
    if to == "next":
        return (y + 1) % classes
    if to == "reverse":
        return classes - 1 - y
    if to == "random":
        steps = key.fold_in("label_flip").bits(len(y)) % np.uint64(classes - 1)
        return (y + 1 + steps.astype(np.int64)) % classes
    return np.full_like(y, int(to))


def backdoor(
    *,
    fraction: float = 0.1,
    clients: PlainText = "",
    target: int = 0,
    size: int = 3,
    share: float = 0.5,
) -> Attack:
    """Stamps a trigger on a share of its examples and labels them as the target class.

    The trigger is a square of the largest pixel value in the lower right corner of images (of
    sequences: the last features of the last steps), or the largest value of each of the last
    features of tables.

    Args:
        fraction: share of the clients that attack.
        clients: their numbers instead, such as "3 7".
        target: the class that the model should predict for examples with the trigger.
        size: side of the square in pixels, or number of features.
        share: of the attacker's examples; at least one.
    """
    check_range(target >= 0, "attack backdoor", "target", "of at least 0", target)
    check_range(size >= 1, "attack backdoor", "size", "of at least 1", size)
    check_range(0 < share <= 1, "attack backdoor", "share", "above 0 and at most 1", share)

    def check(info: DataInfo, shape: tuple[int, ...]) -> None:
        if info.kind == "tokens":
            raise InputError(
                "attack backdoor: triggers are for images and tables, and these data are tokens:"
                " use label_flip"
            )
        if target >= info.classes:
            raise InputError(
                f"attack backdoor: there is no class {target}: classes are numbered 0 to"
                f" {info.classes - 1}"
            )
        largest = min(shape[-2:])
        if size > largest:
            raise InputError(
                f"attack backdoor: a trigger of size {size} does not fit into examples of shape"
                f" {shape}: give at most {largest}"
            )

    def poison(
        x: np.ndarray, y: np.ndarray, info: DataInfo, key: Key
    ) -> tuple[np.ndarray, np.ndarray]:
        chosen = key.fold_in("backdoor").choice(len(y), min(len(y), max(1, round(share * len(y)))))
        x, y = x.copy(), y.copy()
        x[chosen], y[chosen] = stamp(x[chosen], size, info), target
        return x, y

    def success_examples(
        x: np.ndarray, y: np.ndarray, info: DataInfo
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the test examples of other classes with the trigger and the target as label."""
        others = np.flatnonzero(y != target)
        return stamp(x[others], size, info), np.full(len(others), target, dtype=np.int64)

    chosen = parse_attackers("backdoor", fraction, clients)
    return Attack("backdoor", chosen, poison=poison, check=check, measure=success_examples)


def stamp(x: np.ndarray, size: int, info: DataInfo) -> np.ndarray:
    """Return examples with the trigger. x: [n, ...] -> the same shape

    >>> stamp(np.zeros((1, 1, 2, 3), np.uint8), 1, DataInfo("image", 2, np.array(16))).tolist()
    [[[[0, 0, 0], [0, 0, 16]]]]
    """
    stamped = x.copy()
    if info.kind == "table":
        stamped[:, -size:] = info.high[-size:]
    else:
        stamped[..., -size:, -size:] = info.high
    return stamped
