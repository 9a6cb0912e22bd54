"""The log file of a run or a comparison: what its command said, with the time of day."""

from __future__ import annotations

import time
from typing import Any

from remanence.core.progress import LogProgress, Progress, describe_problems
from remanence.core.safe_path import SafePath

LOG = "log.txt"
LARGEST = 1_000_000  # bytes
FULL = "the log is full: later messages are missing\n"


class LogFile(LogProgress):
    """Writes lines to the end of a file. Lines before training begins are kept until it does, since
    there is no folder before.

    Args:
        folder: Of the run or comparison.
    """

    def __init__(self, folder: SafePath):
        super().__init__()
        self.file, self.waiting = folder / LOG, ""
        self.is_open = self.is_full = False

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        self.is_open = True
        super().start(title, done, total, runs, later)
        self.log(f"{title}: from round {done + 1} to {total}")

    def round(self, line: dict[str, Any]) -> None:
        super().round(line)
        for sentence in describe_problems(line):
            self.log(sentence)

    def log(self, text: str) -> None:
        self.waiting = (self.waiting + f"{time.strftime('%H:%M:%S')} {text}\n")[-LARGEST:]
        if not self.is_open:
            return
        content, self.waiting = self.waiting.encode("utf-8", errors="replace"), ""
        with self.file.append() as file:
            if file.seek(0, 2) + len(content) <= LARGEST:
                file.write(content)
            elif not self.is_full:
                file.write(FULL.encode())
                self.is_full = True


class LoggedProgress:
    """A display whose events are also written to a log file.

    Args:
        display: What the user sees.
        folder: Of the run or comparison.
    """

    def __init__(self, display: Progress, folder: SafePath):
        self.display, self.file = display, LogFile(folder)

    def start(self, title: str, done: int, total: int, runs: int = 1, later: int = 0) -> None:
        for each in (self.display, self.file):
            each.start(title, done, total, runs, later)

    def round(self, line: dict[str, Any]) -> None:
        for each in (self.display, self.file):
            each.round(line)

    def log(self, text: str) -> None:
        for each in (self.display, self.file):
            each.log(text)

    def note(self, text: str) -> None:
        for each in (self.display, self.file):
            each.note(text)

    def prepare(self, text: str) -> None:
        for each in (self.display, self.file):
            each.prepare(text)

    def finish(self) -> None:
        for each in (self.display, self.file):
            each.finish()
