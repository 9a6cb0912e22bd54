"""SIGTERM as an exception, so that a run ends the same way as by Ctrl-C: saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from remanence.core.errors import INTERRUPTED, TERMINATED


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """As shells report it."""
    return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM. No effect outside the main thread, which alone may handle
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
