"""What the contenders of a published job share: its files, and how they report their rounds.

A contender runs in its own environment and is called `python X_published.py FOLDER NAME`. It writes
one line of JSON when it is ready for its first round and one after every round, and then waits for
its turn; what it or its packages print goes to the log. This file needs numpy and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


class PublishedTask:
    """One job as `published.py` wrote it: the data, their split, and the numbers of the job."""

    def __init__(self, folder: Path):
        settings = json.loads((folder / "task.json").read_text())
        self.folder = folder
        self.network: str = settings["network"]
        self.classes: int = settings["classes"]
        self.rounds: int = settings["rounds"]
        self.every: int = settings["every"]  # rounds between two evaluations
        self.clients: int = settings["clients"]
        self.cohort: int = settings["cohort"]  # clients of a round
        self.batch: int = settings["batch"]
        self.epochs: int = settings["epochs"]
        self.lr: float = settings["lr"]  # of plain SGD
        self.augment: bool = settings["augment"]
        self.device: str = settings["device"]
        self.precision: str = settings["precision"]
        self.experiment: dict[str, Any] = settings["experiment"]
        arrays = np.load(folder / "arrays.npz")
        self.mean, self.std = arrays["mean"], arrays["std"]  # in units of pixels
        self._rows = {client: arrays[f"rows_{client}"] for client in range(self.clients)}
        self.train_x, self.train_y, self.test_x, self.test_y = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("train_x", "train_y", "test_x", "test_y")
        )

    def client(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's pixels and labels. -> uint8 [n, 3, 32, 32], int64 [n]"""
        rows = self._rows[client]
        return np.array(self.train_x[rows]), np.array(self.train_y[rows])

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return ((x.astype(np.float32) - self.mean) / self.std).astype(np.float32)

    def evaluates(self, number: int) -> bool:
        """Whether the model is evaluated after this round, counted from 1."""
        return number % self.every == 0 or number == self.rounds


class Reports:
    """The conversation with the runner: lines of JSON over what was standard output, and a word
    over standard input before every round. The time between a line and the next word, in which
    others work, does not count.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._spent, self._begin = 0.0, time.perf_counter()

    def start(self, versions: str, note: str) -> None:
        """Everything is read and made: the clock of the rounds starts."""
        self._say(versions=versions, note=note)
        self._spent = 0.0

    def round(self, number: int, loss: float | None = None, accuracy: float | None = None) -> None:
        """A round is over, with its evaluation if it has one; on a GPU, nothing is pending."""
        self._say(round=number, loss=loss, accuracy=accuracy)

    def _say(self, **message: Any) -> None:
        self._spent += time.perf_counter() - self._begin
        print(json.dumps(message | {"seconds": self._spent}), file=self._lines, flush=True)
        # further processes of a contender wait for the first one and not for the runner
        if os.environ.get("PFL_WORKER_RANK", "0") == "0" and sys.stdin.readline() != "go\n":
            raise SystemExit(0)
        self._begin = time.perf_counter()


def versions_of(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def begin() -> tuple[PublishedTask, Reports]:
    """The task that the command line names, and where to report."""
    reports = Reports()
    return PublishedTask(Path(sys.argv[1])), reports
