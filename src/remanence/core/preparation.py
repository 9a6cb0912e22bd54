"""What a process prepares before it can train: steps that are traced, captured or compiled.

The progress display listens. It shows what takes long, and leaves rounds in which something was
prepared out of its estimate of the time left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPILING = "compiling (up to a few minutes the first time; torch keeps the result)"

Listener = Callable[[str], None]

_listeners: list[Listener] = []


def announce(text: str = "") -> None:
    """Call all listeners.

    Args:
        text: What is prepared, to be shown; empty where it takes a few seconds at most.
    """
    for listener in tuple(_listeners):
        listener(text)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with the text of each `announce` of this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def remove_listeners() -> None:
    """Forget the listeners that a worker process inherits."""
    _listeners.clear()
