"""Every fault that the tests cause, the expected result, and the records of trials, from which
docs/reliability.md is written.

A test calls `record_trial("one client sends NaN", "rejected as not-finite", engine="ray")`. With
REMANENCE_TRIALS naming a folder, tests run all trials of the page and write them there; without it
they run a sample and write nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault and the expected result."""

    theme: str
    name: str
    expected: str


class Scale(NamedTuple):
    """The numbers of trials, and of tests they are divided into, so that none takes too long."""

    kills: int
    inputs: int
    parts: int


FOLDER = os.environ.get("REMANENCE_TRIALS", "")
SCALE = (
    Scale(kills=200, inputs=10_000, parts=10) if FOLDER else Scale(kills=20, inputs=200, parts=1)
)

REPLIES, WORKERS, SITES, KILLS, DISK, UNTRUSTED, DROPS, FILES = (
    "Bad replies",
    "Workers and coordinators",
    "Real federations",
    "Killed at any moment",
    "Disks, clocks and signals",
    "Untrusted files",
    "Drop-out and slow clients",
    "Fuzzed files and expressions",
)
UNTOUCHED = "rejected with a code; model and client states as if the client had not been sampled"
EXACT = "resumed: the same bits in model, client states, metrics and ledger"
SENTENCE = "read, or rejected with an error message; bounded memory and time"

# fault: code; test_bad_replies.py makes the replies
BAD_REPLIES = {
    "one client sends NaN": "not-finite",
    "one client sends infinity": "not-finite",
    "NaN in the payload": "not-finite",
    "a wrong shape": "shape",
    "a wrong shape that would broadcast": "shape",
    "a wrong dtype": "dtype",
    "a value that is not a tensor": "dtype",
    "a name is missing": "names",
    "an additional name": "names",
    "a payload that the method does not declare": "names",
    "a payload a hundred times too large": "oversized",
    "a client that was not sampled": "unknown-client",
    "the same client twice": "duplicate",
    "a reply to an earlier round": "wrong-round",
    "a reply to a later round": "wrong-round",
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
    "NPZ of PFLlib",
    "tables (CSV)",
    "tables (Parquet)",
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
    Fault(
        REPLIES,
        "all replies of a round are bad",
        "the round is abandoned, the model does not change",
    ),
    Fault(REPLIES, "all weights are zero", "the round is abandoned, the model does not change"),
    Fault(
        REPLIES,
        "one NaN client of ten, every round",
        "bit for bit the final model of the other nine",
    ),
    Fault(
        REPLIES,
        "a NaN under a robust aggregator",
        "rejected before aggregation; the model stays finite",
    ),
    Fault(
        REPLIES,
        "a NaN client among peers",
        "it keeps its model and is reported; no client mixes NaN",
    ),
    Fault(
        REPLIES,
        "a peer whose model has no valid loss",
        "clients that tried it do not mix with it; it is reported",
    ),
    Fault(WORKERS, "a worker process is killed", "another worker does its work; the same model"),
    Fault(
        WORKERS,
        "a worker process hangs",
        "ended after the timeout, its work repeated; the same model",
    ),
    Fault(
        WORKERS,
        "a client that hangs every time",
        "skipped and reported within twice the timeout; the run continues",
    ),
    Fault(
        WORKERS,
        "an evaluation that hangs every time",
        "an error message within twice the timeout; saved results remain",
    ),
    Fault(
        WORKERS, "the coordinator is killed, workers running", "workers end by themselves; " + EXACT
    ),
    Fault(
        SITES,
        "messages to a site are attacked at random",
        "declined or answered as declared; nothing is trained twice, no client state goes back,"
        " honest replies do not change",
    ),
    Fault(
        SITES,
        "responses to a coordinator are attacked at random",
        "rejected with a code; the final model is that of the honest replies",
    ),
    Fault(
        SITES,
        "messages to the sites of a real federation are attacked",
        "the final model is that of one machine",
    ),
    *(Fault(KILLS, f"killed in {phase}, with a server", EXACT) for phase in PHASES[:5]),
    *(Fault(KILLS, f"killed in {phase}, without a server", EXACT) for phase in PHASES[:5]),
    Fault(KILLS, "killed while a report is written", "the old page or the new one, complete"),
    Fault(KILLS, "killed while a recipe runs", "the same command resumes; the same numbers"),
    Fault(
        DISK,
        "the disk is full",
        "an error message; saved results are intact and resume exactly when there is space",
    ),
    Fault(
        DISK, "the disk is full while a report is written", "an error message; the old page remains"
    ),
    Fault(DISK, "a read-only folder", "an error message before any work"),
    Fault(DISK, "two processes on one folder", "the second is rejected; the first is not affected"),
    Fault(DISK, "the clock goes backwards", "the same bits as without it"),
    Fault(DISK, "Ctrl-C once", "saved, exit code 130, " + EXACT),
    Fault(DISK, "Ctrl-C twice", "ends at once; " + EXACT),
    Fault(DISK, "SIGTERM", "saved, exit code 143, " + EXACT),
    Fault(
        DISK,
        "files that a checkpoint refers to are truncated",
        "the checkpoint is reported and the one before is used",
    ),
    Fault(UNTRUSTED, "a file or folder that names code to import", "rejected without --allow-code"),
    Fault(
        UNTRUSTED,
        "a comparison whose runs are in other folders",
        "rejected; nothing is written outside the folder",
    ),
    Fault(
        UNTRUSTED,
        "links and special files in the place of files and folders of a run",
        "rejected by name; nothing outside the folder is opened or changed",
    ),
    Fault(
        UNTRUSTED,
        "files of a run changed after the run",
        "rejected by name; neither resumed, evaluated nor exported",
    ),
    Fault(
        UNTRUSTED,
        "archive bombs and headers with too large sizes",
        "rejected before memory is allocated",
    ),
    Fault(
        UNTRUSTED,
        "a drift table changed since the run began",
        "an error message; the run does not resume",
    ),
    Fault(
        UNTRUSTED, "data changed since the run began", "an error message; the run does not resume"
    ),
    Fault(
        UNTRUSTED,
        "a run folder is attacked at random",
        "the unbroken run's numbers, or an error message that names a file; no traceback, no hang,"
        " nothing outside read or changed",
    ),
    Fault(DROPS, "10% of the clients drop out", "every round ends with the clients that reply"),
    Fault(DROPS, "30% of the clients drop out", "every round ends with the clients that reply"),
    Fault(DROPS, "50% of the clients drop out", "every round ends with the clients that reply"),
    Fault(DROPS, "all clients drop out", "the round is abandoned, the model does not change"),
    Fault(
        DROPS,
        "10% drop out, 130% are sampled",
        "no round fails; accuracy on digits within two points, over five seeds",
    ),
    Fault(DROPS, "late replies are outstanding when the run is killed", EXACT),
    *(Fault(FILES, reader, SENTENCE) for reader in READERS),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def record_trial(name: str, happened: str, times: int = 1, engine: str = "") -> None:
    """Record trials of a fault that ended as expected; others have failed their test before."""
    assert name in BY_NAME, f"{name!r} is not in the list of faults"
    _write({"fault": name, "happened": happened, "times": times, "engine": engine})


def record_skipped(name: str, why: str) -> None:
    """Record a fault that cannot be tested on this machine."""
    assert name in BY_NAME, f"{name!r} is not in the list of faults"
    _write({"fault": name, "happened": f"not tested: {why}", "times": 0, "engine": ""})


def _write(line: dict[str, object]) -> None:
    if FOLDER:
        folder = Path(FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        # one file a process: workers never share one
        with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
