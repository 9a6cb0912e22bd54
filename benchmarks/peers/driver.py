"""What all drivers share: a job's files, and the turns they take.

A driver runs in its peer's environment and is called `python X_job.py FOLDER NAME`. It prepares
everything, says that it is ready, and then plays one round for each line `go` that it reads; every
answer is one line of JSON. So one process of each contender can wait while another one works. This
file needs numpy and nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


class PeerJob:
    """One job as `job_folder.py` wrote it: who trains on what, in which order, from which
    weights.
    """

    def __init__(self, folder: Path):
        settings = json.loads((folder / "job.json").read_text())
        self.folder = folder
        self.name: str = settings["name"]
        self.changes: dict[str, Any] = settings["changes"]
        self.model: str = settings["model"]
        self.shape: tuple[int, ...] = tuple(settings["shape"])
        self.classes: int = settings["classes"]
        self.clients: int = settings["clients"]
        self.cohort: list[int] = settings["cohort"]
        self.sizes: list[int] = settings["sizes"]  # of the cohort
        self.batch: int = settings["batch"]
        self.epochs: int = settings["epochs"]
        self.optimizer: str = settings["optimizer"]  # SGD or Adam, as torch.optim calls them
        # what torch.optim wants besides the parameters
        self.optimizer_hparams: dict[str, Any] = settings["optimizer_hparams"]
        self._plan = np.load(folder / "plan.npz")
        self._x, self._y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")

    def start(self) -> dict[str, np.ndarray]:
        """The weights of the first round, under the names of our own network."""
        with np.load(self.folder / "start.npz") as file:
            return dict(file)

    def examples(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """All rows of a client, already normalized: a gift to the peers, since our own engine
        does this for every batch. -> [n, c, h, w], [n]
        """
        rows = self._plan[f"rows_{client}"]
        return (self._x[rows].astype(np.float32) - self._plan["mean"]) / self._plan[
            "std"
        ], np.array(self._y[rows])

    def orders(self, client: int) -> np.ndarray:
        """In which order a client of the cohort visits its rows. -> [epochs, n]"""
        return self._plan[f"order_{client}"]


@functools.cache
def open_job(folder: str) -> PeerJob:
    """The same object wherever a process asks for it."""
    return PeerJob(Path(folder))


class Turns:
    """The conversation with `turns.py`, over what was standard input and output: the peers may
    print what they like, it goes to the log.
    """

    def __init__(self, result: Path, followers: Sequence[subprocess.Popen[str]] = ()):
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._result, self._followers, self._begin = result, followers, 0.0

    def ready(self, *packages: str, note: str) -> None:
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        self._answer({"versions": versions, "note": note})

    def wait(self) -> None:
        """Until it is our turn; starts the clock."""
        word = sys.stdin.readline().strip() or "stop"
        # they are told: a pipe that other children hold open too has no end
        for follower in self._followers:
            print(word, file=follower.stdin, flush=True)
        if word != "go":
            raise SystemExit(0)
        self._begin = time.perf_counter()

    def done(self, weights: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """The round is over and its model stands; the weights of the first round are left for
        comparison.
        """
        seconds = time.perf_counter() - self._begin
        if not self._result.exists():
            np.savez(self._result, **weights())
        self._answer({"seconds": seconds})

    def _answer(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)


def begin(followers: Sequence[subprocess.Popen[str]] = ()) -> tuple[PeerJob, Turns]:
    """The job and the turns that the command line asks for."""
    folder, name = sys.argv[1:3]
    return open_job(folder), Turns(Path(folder) / f"result-{name}.npz", followers)
