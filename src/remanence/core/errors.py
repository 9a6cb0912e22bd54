"""What we raise: the thing, the cause, the cure.

Everything a user can get wrong raises `InputError` with one sentence, before any work starts. The
command line prints that sentence and exits with `exit_code`; no traceback is shown. Anything else
that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RemanenceError(Exception):
    """Every error this package raises on purpose."""

    exit_code = 1


class InputError(RemanenceError, ValueError):
    """Something given to us cannot be used: the message names the thing, the cause and the cure."""

    exit_code = 2


class CheckpointError(RemanenceError):
    """A saved state cannot be trusted: damaged, truncated, foreign or newer than this version."""

    exit_code = 2


class RunFailed(RemanenceError):
    """A run cannot go on although its input was fine (the disk is full, a worker process died)."""

    exit_code = 1


class Stopped(RemanenceError):
    """A run was asked to stop and has saved itself; `exit_code` says by whom."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


INTERRUPTED = 130  # Ctrl-C, as shells report it
OUT_OF_TIME = 75  # --time-limit: "temporary failure, try again", from sysexits.h
TERMINATED = 143  # SIGTERM, as shells report it


def first_line(error: BaseException) -> str:
    """What an error says, as part of a sentence of ours.

    >>> first_line(ValueError("no\\nand more")), first_line(ValueError())
    ('no', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that helps after a wrong name.

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
    """Replies that passed the gate one by one do not make a model together; the round is
    abandoned.
    """


def check_range(condition: bool, thing: str, name: str, wanted: str, value: float) -> None:
    """A number in its range, or a sentence."""
    if not condition or value != value or abs(value) == float("inf"):
        raise InputError(f"{thing}: {name} must be a number {wanted}, not {value}")
