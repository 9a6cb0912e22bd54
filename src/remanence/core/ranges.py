"""The range check that parts, optimizers and attacks make of their hyper-parameters."""

from __future__ import annotations

from remanence.core.errors import InputError


def check_range(condition: bool, thing: str, name: str, wanted: str, value: float) -> None:
    """Raise `InputError` unless a hyper-parameter is finite and in its range.

    Args:
        condition: Whether the number is in its range.
        thing: The part or option group that it belongs to, for the message.
        name: The name of the hyper-parameter.
        wanted: Its range in words, such as "above 0".
        value: The number.

    >>> check_range(0.1 > 0, "fedprox", "mu", "above 0", 0.1)
    """
    if not condition or value != value or abs(value) == float("inf"):
        raise InputError(f"{thing}: {name} must be a number {wanted}, not {value}")
