"""Every fault we try, what we expect of it, and how trials are counted: what docs/reliability.md is
made of.

A test says `tried("one client sends NaN", "refused as not-finite", engine="sequential")`. With
REMANENCE_TRIALS naming a folder everything is tried as often as the page promises, and each trial
is written there; without it a sample is tried, and nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """What may go wrong, and what shall come of it."""

    theme: str
    name: str
    expected: str


class Scale(NamedTuple):
    """How often things are tried, and in how many tests, so that none takes too long."""

    kills: int
    inputs: int
    parts: int


FOLDER = os.environ.get("REMANENCE_TRIALS", "")
SCALE = (
    Scale(kills=200, inputs=10_000, parts=10) if FOLDER else Scale(kills=20, inputs=200, parts=1)
)

REPLIES, WORKERS, KILLS, DISK, PEOPLE, DROPS, FILES = (
    "Bad replies",
    "Workers and coordinators",
    "Killed at any moment",
    "Disks, clocks and signals",
    "Strangers",
    "Drop-out and slow clients",
    "Fuzzed files and expressions",
)
UNTOUCHED = "refused by name and code; model and client states as if it had not been asked"
EXACT = "resumed: the same bits in model, client states, metrics and ledger"
SENTENCE = "read, or refused in one sentence; bounded memory and time"

# (code, fault): how replies are spoiled is said in test_bad_replies.py
BAD_REPLIES = {
    "one client sends NaN": "not-finite",
    "one client sends infinity": "not-finite",
    "NaN in what travels besides the model": "not-finite",
    "a wrong shape": "shape",
    "a wrong shape that would broadcast": "shape",
    "a wrong dtype": "dtype",
    "something that is no tensor": "dtype",
    "a name is missing": "names",
    "a name too many": "names",
    "extras that the method does not have": "names",
    "a payload a hundred times too large": "oversized",
    "a client that was not asked": "unknown-client",
    "the same client twice": "duplicate",
    "a reply of an earlier round": "wrong-round",
    "a reply of a later round": "wrong-round",
    "a negative number of examples": "weight",
    "a huge number of examples": "weight",
    "NaN examples": "weight",
    "no examples": "weight",
    "a model that moved beyond round.max_norm": "norm",
}
READERS = (
    "IDX (MNIST, EMNIST)",
    "CIFAR, binary",
    "CIFAR, pickled",
    "MATLAB (SVHN)",
    "LEAF JSON",
    "NPZ",
    "folders of images",
    "experiment TOML",
    "method expressions",
    "expressions of drift, attack, partition and the like",
    "drift tables",
    "checkpoints",
    "ledger.bin",
    "confusion.bin, examples.bin, peers.bin",
    "metrics.jsonl",
    "experiment.toml and compare.toml of a folder",
    "replies at the gate",
)
PHASES = ("training", "gate and server", "evaluation", "record", "checkpoint", "report", "recipe")

FAULTS = (
    *(Fault(REPLIES, name, UNTOUCHED) for name in BAD_REPLIES),
    Fault(REPLIES, "all replies of a round are bad", "the round is abandoned, the model stays"),
    Fault(REPLIES, "all weights are zero", "the round is abandoned, the model stays"),
    Fault(
        REPLIES,
        "one NaN client of ten, every round",
        "the final model is that of the nine others, bit by bit",
    ),
    Fault(
        REPLIES,
        "a NaN under a robust aggregator",
        "refused before it is combined; the model stays finite",
    ),
    Fault(
        REPLIES, "a NaN client among peers", "it keeps its model, is named, and nobody mixes NaN"
    ),
    Fault(
        REPLIES, "a peer whose model has no loss", "nobody who tried it mixes with it; it is named"
    ),
    Fault(WORKERS, "a worker process is killed", "another does its work; the same model"),
    Fault(
        WORKERS,
        "a worker process hangs",
        "ended after the timeout, its work done again; the same model",
    ),
    Fault(
        WORKERS,
        "a client that hangs every time",
        "passed over and named within twice the timeout; the run goes on",
    ),
    Fault(
        WORKERS,
        "an evaluation that hangs every time",
        "one sentence within twice the timeout; nothing saved is lost",
    ),
    Fault(
        WORKERS, "the coordinator is killed, workers running", "workers end by themselves; " + EXACT
    ),
    *(Fault(KILLS, f"killed in {phase}, with a server", EXACT) for phase in PHASES[:5]),
    *(Fault(KILLS, f"killed in {phase}, without a server", EXACT) for phase in PHASES[:5]),
    Fault(KILLS, "killed while a report is written", "the old page or the new one, whole"),
    Fault(KILLS, "killed while a recipe runs", "the same command goes on; the same numbers"),
    Fault(
        DISK,
        "the disk is full",
        "one sentence; what was saved is good, and resumes exactly once there is room",
    ),
    Fault(DISK, "the disk is full while a report is written", "one sentence; the old page stays"),
    Fault(DISK, "a folder that may not be written", "one sentence before any work"),
    Fault(DISK, "two processes on one folder", "the second is refused; the first is not disturbed"),
    Fault(DISK, "the clock goes backwards", "the same bits as without"),
    Fault(DISK, "Ctrl-C once", "saved, exit code 130, " + EXACT),
    Fault(DISK, "Ctrl-C twice", "ends at once; " + EXACT),
    Fault(DISK, "SIGTERM", "saved, exit code 143, " + EXACT),
    Fault(
        DISK,
        "files behind the checkpoint are cut short",
        "the checkpoint is named and passed over for the one before",
    ),
    Fault(PEOPLE, "a file or folder that names code to import", "refused until --allow-code"),
    Fault(
        PEOPLE,
        "a comparison whose runs lie elsewhere",
        "refused; nothing is written outside the folder",
    ),
    Fault(
        PEOPLE,
        "archive bombs and headers that declare too much",
        "refused before the memory is taken",
    ),
    Fault(
        PEOPLE, "a drift table changed since the run began", "one sentence; the run does not go on"
    ),
    Fault(PEOPLE, "data changed since the run began", "one sentence; the run does not go on"),
    Fault(DROPS, "10% of the clients drop out", "every round ends with those that answer"),
    Fault(DROPS, "30% of the clients drop out", "every round ends with those that answer"),
    Fault(DROPS, "50% of the clients drop out", "every round ends with those that answer"),
    Fault(DROPS, "everybody drops out", "the round is abandoned, the model stays"),
    Fault(
        DROPS,
        "10% drop out, 130% are asked",
        "no round fails; accuracy on digits within two points, over five seeds",
    ),
    Fault(DROPS, "late answers under way when the run is killed", EXACT),
    *(Fault(FILES, reader, SENTENCE) for reader in READERS),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def tried(name: str, happened: str, times: int = 1, engine: str = "") -> None:
    """Count trials of a fault that ended as expected; one that did not has failed its test
    before.
    """
    assert name in BY_NAME, f"{name!r} is not in the list of faults"
    _write({"fault": name, "happened": happened, "times": times, "engine": engine})


def not_tried(name: str, why: str) -> None:
    """A fault that cannot be tried here."""
    assert name in BY_NAME, f"{name!r} is not in the list of faults"
    _write({"fault": name, "happened": f"not tried: {why}", "times": 0, "engine": ""})


def _write(line: dict[str, object]) -> None:
    if FOLDER:
        folder = Path(FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        # one file a process: workers never share one
        with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
