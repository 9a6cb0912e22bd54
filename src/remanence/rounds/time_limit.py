"""A time limit for runs, which is checked between rounds."""

from __future__ import annotations

import time


class TimeLimit:
    """Starts another round only if it can be expected to end in time."""

    def __init__(self, seconds: float | None):
        self.begin, self.seconds, self.rounds = time.monotonic(), seconds, 0

    def passed(self) -> bool:
        """Whether another round would end too late. The first round of a session always runs, so
        that every session makes progress.
        """
        if self.seconds is None or self.rounds == 0:
            return False
        elapsed = time.monotonic() - self.begin
        return elapsed + elapsed / self.rounds > self.seconds

    def copy(self) -> TimeLimit:
        """A copy for one of several runs that train at once, each of which counts its rounds."""
        return TimeLimit(
            None if self.seconds is None else self.begin + self.seconds - time.monotonic()
        )
