"""Whatever ends a run, going on gives the result of an unbroken one: the same bits in the
model, the client states, the metrics and the ledger.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trust.killing import in_child

import remanence as rem
from remanence.config import Experiment, parse_experiment
from remanence.core.errors import (
    INTERRUPTED,
    OUT_OF_TIME,
    TERMINATED,
    CheckpointError,
    InputError,
    RunFailed,
    Stopped,
)
from remanence.results.checkpoint import MANIFEST, STATE
from remanence.results.run import CHECKPOINTS, EXPERIMENT, LEDGER, METRICS
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.time_limit import TimeLimit
from remanence.training import server_step

ROUNDS = 12


def small_net() -> nn.Module:
    """Batch norm, so that with buffers = local every client has a state of its own."""
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4)
    )


def small_config(**changes: Any) -> Experiment:
    keys = {
        "data.name": "synthetic(samples=300, classes=4, features=8)",
        "data.partition": "iid",
        "clients.count": 6,
        "clients.sample": 3,
        "rounds": ROUNDS,
        "engine": "sequential",
        "threads": 1,
        "local.buffers": "local",
        "local.batch_size": 10,
        "local.optimizer": "sgd(lr=0.1, momentum=0.9)",
        "local.schedule": "exponential(decay=0.9)",
        "record.local": True,
        "checkpoint.seconds": 0,
    }
    return parse_experiment({}, keys | changes)


def seeded_net() -> nn.Module:
    from remanence.core.model import init_module
    from remanence.core.rng import Key

    return init_module(small_net, Key(0))


def contents(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for times: the newest checkpoint, the client files it
    names, metrics and ledger.
    """
    newest = sorted((folder / CHECKPOINTS).glob("round-*"))[-1]
    manifest = json.loads((newest / MANIFEST).read_text())
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    own = {client: entry["sha256"] for client, entry in manifest["client_states"].items()}
    return {
        "round": manifest["round"],
        "state": (newest / STATE).read_bytes(),
        "client_state": own,
        "metrics": lines,
        "ledger": (folder / LEDGER).read_bytes(),
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The unbroken run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    start_run(small_config(), folder, module=seeded_net())
    found = contents(folder)
    assert found["round"] == ROUNDS
    assert len(found["client_state"]) == 6  # every client took part at some time and has a state
    return found


def test_twenty_kills_at_random_moments_and_twenty_exact_resumes(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    begin = time.monotonic()
    start_run(small_config(), tmp_path / "timed", module=seeded_net())
    usual = time.monotonic() - begin
    draw = random.Random(20)
    killed_inside = 0
    for trial in range(20):
        folder = tmp_path / f"run-{trial}"
        child = in_child(
            lambda folder=folder: start_run(small_config(), folder, module=seeded_net())
        )
        child.join(draw.uniform(0.0, 1.2) * usual)
        child.kill()
        child.join()
        killed_inside += child.exitcode == -signal.SIGKILL
        if (folder / EXPERIMENT).exists():
            resume_run(folder, module=seeded_net())
        else:  # killed before there was anything to go on with
            start_run(small_config(), folder, overwrite=True, module=seeded_net())
        assert contents(folder) == straight, f"trial {trial}"
    assert killed_inside >= 10  # otherwise the test would show little


def test_repeated_kills_of_one_run(tmp_path: Path, straight: dict[str, Any]) -> None:
    """Killed, resumed and killed again, until it happens to finish."""
    folder = tmp_path / "run"
    child = in_child(lambda: start_run(small_config(), folder, module=seeded_net()))
    draw = random.Random(3)
    for _ in range(8):
        child.join(draw.uniform(0.05, 0.25))
        child.kill()
        child.join()
        if not (folder / EXPERIMENT).exists():
            child = in_child(
                lambda: start_run(small_config(), folder, overwrite=True, module=seeded_net())
            )
        else:
            child = in_child(lambda: resume_run(folder, module=seeded_net()))
    child.join()
    resume_run(folder, module=seeded_net())
    assert contents(folder) == straight


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_a_signal_saves_and_names_the_way_on(
    tmp_path: Path, straight: dict[str, Any], signal_number: int, code: int
) -> None:
    class Interrupting:
        """Sends the signal from inside the run, after round 5."""

        def start(self, title: str, done: int, total: int) -> None: ...
        def log(self, text: str) -> None: ...
        def prepare(self, text: str) -> None: ...
        def finish(self) -> None: ...

        def round(self, line: dict[str, Any]) -> None:
            if line["round"] == 5:
                os.kill(os.getpid(), signal_number)

    folder = tmp_path / "run"
    with pytest.raises(Stopped, match=r"remanence resume") as stop:
        start_run(
            small_config(**{"checkpoint.seconds": 1000}),
            folder,
            module=seeded_net(),
            progress=Interrupting(),
        )
    assert stop.value.exit_code == code
    assert contents(folder)["round"] == 5
    resume_run(folder, module=seeded_net())
    assert contents(folder) == straight


def test_memory_that_does_not_suffice_at_the_server_is_said_and_the_rounds_before_are_saved(
    tmp_path: Path, straight: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = server_step.update

    def scarce(task: Any, old: Any, replies: Any, round: int, *rest: Any) -> Any:
        if round == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90.00 MiB")
        return update(task, old, replies, round, *rest)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(server_step, "update", scarce)
        with pytest.raises(
            RunFailed,
            match=r"out of memory in round 6, all before it is saved: go on with remanence resume",
        ):
            start_run(small_config(**{"checkpoint.seconds": 1000}), folder, module=seeded_net())
    assert contents(folder)["round"] == 5
    resume_run(folder, module=seeded_net())
    assert contents(folder) == straight


def test_a_time_limit_saves_and_every_session_gets_somewhere(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stopped, match="time is up after round 1 of 12") as stop:
        start_run(small_config(), folder, module=seeded_net(), time_limit=TimeLimit(0.0))
    assert stop.value.exit_code == OUT_OF_TIME
    for session in range(2, ROUNDS):
        with pytest.raises(Stopped, match=f"after round {session} "):
            resume_run(folder, module=seeded_net(), time_limit=TimeLimit(0.0))
    resume_run(folder, module=seeded_net(), time_limit=TimeLimit(0.0))
    assert contents(folder) == straight


def test_more_rounds_than_were_meant(tmp_path: Path, straight: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    start_run(small_config(rounds=7), folder, module=seeded_net())
    resume_run(folder, rounds=ROUNDS, module=seeded_net())
    assert contents(folder) == straight
    with pytest.raises(InputError, match="must not be smaller"):
        resume_run(folder, rounds=3, module=seeded_net())


def newest_and_older(folder: Path) -> tuple[Path, Path]:
    older, newest = sorted((folder / CHECKPOINTS).glob("round-*"))
    return newest, older


def damage_state(checkpoint: Path) -> None:
    content = bytearray((checkpoint / STATE).read_bytes())
    content[-1] ^= 1
    (checkpoint / STATE).write_bytes(content)


def truncate_state(checkpoint: Path) -> None:
    content = (checkpoint / STATE).read_bytes()
    (checkpoint / STATE).write_bytes(content[: len(content) // 2])


def change_manifest(**entries: Any) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def empty_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("")


DAMAGES = {
    "damaged": (damage_state, "SHA-256"),
    "truncated": (truncate_state, "SHA-256"),
    "foreign": (change_manifest(run="somebody else's"), "another experiment"),
    "not ours": (change_manifest(program="another"), "not written by remanence"),
    "newer": (change_manifest(format=99), "update remanence"),
    "empty": (empty_manifest, "cannot be read"),
}


class Listening:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, title: str, done: int, total: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...

    def log(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, straight: dict[str, Any], kind: str
) -> None:
    damage, reason = DAMAGES[kind]
    folder = tmp_path / "run"
    start_run(small_config(rounds=7), folder, module=seeded_net())
    newest, older = newest_and_older(folder)
    assert (newest.name, older.name) == ("round-0000007", "round-0000006")
    damage(newest)
    listening = Listening()
    resume_run(folder, rounds=ROUNDS, module=seeded_net(), progress=listening)
    assert any("round-0000007" in text and reason in text for text in listening.said)
    assert contents(folder) == straight


def test_no_good_checkpoint_left_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start_run(small_config(rounds=3), folder, module=seeded_net())
    for checkpoint in newest_and_older(folder):
        damage_state(checkpoint)
    with pytest.raises(CheckpointError, match=r"round-0000003.*round-0000002"):
        resume_run(folder, rounds=5, module=seeded_net())


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start_run(small_config(rounds=3), folder, module=seeded_net())
    before = contents(folder)
    resume_run(folder, module=seeded_net())
    assert contents(folder) == before


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    from remanence.core.files import lock

    folder = tmp_path / "run"
    start_run(small_config(rounds=2), folder, module=seeded_net())
    with lock(folder), pytest.raises(InputError, match="in use by another"):
        resume_run(folder, module=seeded_net())


def test_a_run_with_its_own_model_says_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start_run(small_config(rounds=2), folder, module=seeded_net())
    with pytest.raises(InputError, match=r"rem\.resume\(.*model=\.\.\.\)"):
        resume_run(folder, rounds=3)


def test_rounds_without_a_checkpoint_are_not_deleted(tmp_path: Path) -> None:
    run = rem.run(
        data="synthetic(samples=200, classes=2, features=3)",
        model="mlp(hidden=4)",
        clients=2,
        rounds=1,
        engine="sequential",
        out=tmp_path / "run",
        quiet=True,
    )
    shutil.rmtree(run.checkpoints)
    before = (run.folder / METRICS).read_bytes()
    with pytest.raises(CheckpointError, match="no checkpoint to continue from: start anew"):
        rem.resume(run.folder, quiet=True)
    assert (run.folder / METRICS).read_bytes() == before
