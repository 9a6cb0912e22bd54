"""The progress display of a run: a bar in a terminal or a notebook, lines elsewhere, nothing with
--quiet. All of it is also written to the log file of the run (`log_file`).
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol

from remanence.core.notebook import NotebookCell, in_notebook


class Progress(Protocol):
    """Receives the events of a run.

    `start` is called with the title, the last round before the first one, the number of rounds, how
    many runs train together, and the rounds of all runs that come later.
    """

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def log(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...


class NullProgress:
    """For programs and for --quiet."""

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def log(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...


class TimeLeft:
    """Estimates the time left from the rounds in which nothing was prepared.

    Args:
        done: The last round before the first one.
        total: The number of rounds.
        runs: How many runs train together.
        later: Rounds of all runs that come later. One of them is expected to take as long as one of
            these, divided by the number of runs that train together.
    """

    def __init__(self, done: int, total: int, runs: int = 1, later: int = 0):
        self.rest = later / runs
        self.total, self.last, self.since = total, done, time.monotonic()
        self.rounds, self.seconds, self.prepared = 0, 0.0, False

    def prepare(self) -> None:
        """Leave the current round out."""
        self.prepared = True

    def round(self, number: int) -> str:
        """What to show after a round; nothing as long as there is no estimate."""
        now = time.monotonic()
        if not self.prepared:
            self.rounds += number - self.last
            self.seconds += now - self.since
        self.last, self.since, self.prepared = number, now, False
        if not self.rounds:
            return ""
        rounds = self.total - number + self.rest
        if not rounds:
            return ""
        left = duration(self.seconds / self.rounds * rounds)
        return f"{left} left in all" if self.rest else f"{left} left"


class _Display:
    """What displays have in common: messages that are shown once, and the time left."""

    def __init__(self) -> None:
        self.noted: set[str] = set()
        self.left = TimeLeft(0, 0)

    def log(self, text: str) -> None:
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Log a message that several runs of a command may have, once."""
        if text not in self.noted:
            self.noted.add(text)
            self.log(text)

    def prepare(self, text: str) -> None:
        """Something is prepared, which takes time in this round only."""
        self.left.prepare()
        if text:
            self.note(text)


class LogProgress(_Display):
    """Prints lines where there is no terminal: about twenty a run, whatever its length.

    Args:
        verbose: Print every round, and why replies were rejected.
    """

    def __init__(self, verbose: bool = False) -> None:
        super().__init__()
        self.verbose = verbose
        self.title, self.total, self.shown = "", 0, -1

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        self.title, self.total, self.shown = title, total, -1
        self.left = TimeLeft(done, total, runs, later)

    def round(self, line: dict[str, Any]) -> None:
        number, left = line["round"], self.left.round(line["round"])
        twentieth = number * 20 // self.total
        if (
            not self.verbose
            and twentieth == self.shown
            and number != self.total
            and not line["rejected"]
            and not line["abandoned"]
            and not line.get("no_response")
        ):
            return
        self.shown = twentieth
        self.log(
            f"{self.title}: round {number}/{self.total}{describe_round(line)}"
            + (f", {left}" if left else "")
        )
        if self.verbose:
            for sentence in describe_problems(line):
                self.log(sentence)

    def log(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def finish(self) -> None: ...


class BarProgress(_Display):
    """A bar in the terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self.console = Console(stderr=True)
        self.bar: Any = None
        self.task: Any = None

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
        )
        self.bar = RichProgress(*columns, console=self.console)
        self.task = self.bar.add_task(title, total=total, completed=done, state="", left="")
        self.left = TimeLeft(done, total, runs, later)
        self.bar.start()

    def round(self, line: dict[str, Any]) -> None:
        changes = (
            {"state": describe_round(line).removeprefix(", ")}
            if line["accuracy"] is not None
            else {}
        )
        left = self.left.round(line["round"])
        self.bar.update(self.task, completed=line["round"], left=left, **changes)
        for sentence in describe_problems(line):
            self.log(sentence)

    def log(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class NotebookProgress(_Display):
    """A bar in the output of a notebook's cell, with the last messages below it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.title = NotebookCell(), ""

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        self.title, self.left = title, TimeLeft(done, total, runs, later)
        self.cell.text, self.cell.done, self.cell.total = title, done, total
        self.cell.show(now=True)

    def round(self, line: dict[str, Any]) -> None:
        number, left = line["round"], self.left.round(line["round"])
        place = f"{self.title}: round {number}/{self.cell.total}{describe_round(line)}"
        self.cell.text, self.cell.done = f"{place}, {left}" if left else place, number
        self.cell.messages.extend(describe_problems(line))
        self.cell.show()

    def log(self, text: str) -> None:
        self.cell.messages.append(text)
        self.cell.show()

    def finish(self) -> None:
        self.cell.show(now=True)


class SharedProgress:
    """One bar for runs that train together, one or several.

    All are in the same round, so the bar shows the first run. Rejections, abandoned rounds and
    messages of the others are logged.

    Args:
        progress: Shows it.
        title: Of these runs.
        runs: How many they are.
        later: Rounds of all runs that come later.
    """

    def __init__(self, progress: Progress, title: str, runs: int = 1, later: int = 0):
        self.progress, self.title, self.lead = progress, title, threading.Lock()
        self.runs, self.later = runs, later

    def for_run(self) -> RunProgress:
        """The progress of one of the runs."""
        return RunProgress(self)


class RunProgress:
    """The progress of one run of several."""

    def __init__(self, shared: SharedProgress):
        self.shared, self.leads, self.title = shared, False, ""

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        self.title, self.leads = title, self.shared.lead.acquire(blocking=False)
        if self.leads:
            shared = self.shared
            shared.progress.start(shared.title, done, total, shared.runs, shared.later)

    def round(self, line: dict[str, Any]) -> None:
        if self.leads:
            self.shared.progress.round(line)
        elif line["rejected"] or line["abandoned"]:
            self.log(f"{self.title}: round {line['round']}{describe_round(line)}")

    def log(self, text: str) -> None:
        self.shared.progress.log(text)

    def note(self, text: str) -> None:
        self.shared.progress.note(text)

    def prepare(self, text: str) -> None:
        if self.leads:
            self.shared.progress.prepare(text)

    def finish(self) -> None:
        if self.leads:
            self.leads = False
            self.shared.progress.finish()


def make_progress(quiet: bool, verbose: bool = False) -> Progress:
    """The display that suits the place where the program runs.

    Args:
        quiet: Show nothing.
        verbose: A line for every round.
    """
    if quiet:
        return NullProgress()
    if verbose:
        return LogProgress(verbose)
    if in_notebook():
        return NotebookProgress()
    return BarProgress() if sys.stderr.isatty() else LogProgress()


def describe_problems(line: dict[str, Any]) -> list[str]:
    """What went wrong in a round, in sentences."""
    number = line["round"]
    found = [
        f"round {number}: client {rejection['client']} rejected ({rejection['code']}):"
        f" {rejection['reason']}"
        for rejection in line["rejected"]
    ]
    silent = line.get("no_response", [])
    found += [f"round {number}: client {client} did not answer" for client in silent]
    if line["abandoned"]:
        reason = line.get("problem", "too few replies")
        found.append(f"round {number} abandoned, the model did not change: {reason}")
    return found


def describe_round(line: dict[str, Any]) -> str:
    """The end of a progress line.

    >>> describe_round({"accuracy": 0.912, "rejected": [], "abandoned": False})
    ', accuracy 91.2%'
    >>> metrics = {"accuracy": None, "rejected": [], "no_response": [4, 7], "abandoned": False}
    >>> describe_round(metrics)
    ', no answer: client 4, client 7'
    >>> problem = "the new model holds NaN or infinity"
    >>> describe_round({"accuracy": None, "rejected": [], "abandoned": True, "problem": problem})
    ', round abandoned: the new model holds NaN or infinity'
    """
    text = "" if line["accuracy"] is None else f", accuracy {100 * line['accuracy']:.1f}%"
    if line["rejected"]:
        who = ", ".join(
            f"client {rejection['client']} ({rejection['code']})"
            for rejection in line["rejected"][:3]
        )
        text += f", rejected: {who}" + (
            f" and {len(line['rejected']) - 3} more" if len(line["rejected"]) > 3 else ""
        )
    if silent := line.get("no_response", []):
        text += f", no answer: {', '.join(f'client {client}' for client in silent[:3])}" + (
            f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        )
    if line["abandoned"]:
        reason = line.get("problem")
        text += f", round abandoned: {reason}" if reason else ", round abandoned"
    return text


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.4), duration(75), duration(7400)
    ('1 s', '1 min 15 s', '2 h 3 min')
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
