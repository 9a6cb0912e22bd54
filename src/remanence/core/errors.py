"""Errors. A message says what is wrong, why, and what to do.

Every mistake of a user raises `InputError` with one sentence, before work starts where possible.
The command line prints that sentence and exits with `exit_code`, without a traceback. Any other
exception is a defect of Remanence and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RemanenceError(Exception):
    """Every error this package raises on purpose."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentence alone, as the command line does."""
        return [f"{type(self).__name__}: {self}"]


class InputError(RemanenceError, ValueError):
    """A setting, file or argument cannot be used."""

    exit_code = 2


class CheckpointError(RemanenceError):
    """A saved state cannot be used: damaged, of another experiment, or of a newer version."""

    exit_code = 2


class OverMemoryLimit(InputError):
    """Reading would take more memory than the limit; the file may be in order."""


class UnsafeFile(RemanenceError):
    """A folder holds a link or a special file where a file or folder belongs. No reader takes it
    for a file that is merely damaged, since whoever made it may want another file to be changed.
    """

    exit_code = 2


class RunFailed(RemanenceError):
    """A run with valid settings cannot continue (the disk is full, a worker process died)."""

    exit_code = 1


class Stopped(RemanenceError):
    """A run stopped early and is saved; `exit_code` says why."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class LearnedNothing(UserWarning):
    """A run ended with the untrained model, or diverged; its numbers measure no learning."""


class SkippedCheckpoint(UserWarning):
    """A model was read from an older checkpoint, since newer ones cannot be used."""


# a run learned nothing, or only its state before round 1 can be read: "data error", from sysexits.h
NOTHING_LEARNED = 65
INTERRUPTED = 130  # Ctrl-C, as shells report it
OUT_OF_TIME = 75  # --time-limit: "temporary failure, try again", from sysexits.h
TERMINATED = 143  # SIGTERM, as shells report it


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where there is no message.

    >>> first_line(ValueError("no\\nand more")), first_line(ValueError())
    ('no', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest known names for a wrong one, as the end of a sentence.

    >>> nearest("fedporx", ["fedavg", "fedprox"])
    'did you mean fedprox?'
    >>> nearest("zzz", ["fedavg", "fedprox"])
    'known: fedavg, fedprox'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a list of names."""
    return InputError(f"unknown {kind} {name!r}: {nearest(name, known)}")


class AggregationFailed(Exception):
    """Valid replies cannot be aggregated, for example because there are too few; the round is
    abandoned.
    """
