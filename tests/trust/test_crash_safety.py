"""Full or read-only disks, folders in use, clocks that jump, signals: an error message, nothing is
lost, and the same bits in the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rounds.drift_runs import config_of
from rounds.test_decentralized import EVERYTHING, all_contents
from rounds.test_resume import Listening, contents, seeded_net, small_config
from rounds.test_stragglers import SLOW
from trust.faults import SCALE, record_skipped, record_trial
from trust.killing import in_child

from remanence.config import parse_experiment
from remanence.core.errors import INTERRUPTED, TERMINATED, InputError, RunFailed, Stopped
from remanence.reports import write_report
from remanence.results.run import EXPERIMENT, LEDGER, METRICS
from remanence.rounds.loop import resume_run, start_run

SMALL_DISK = 1 << 21


def mount(place: Path, options: str) -> bool:
    """Mount a small file system, if permitted."""
    place.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        return False
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True
        ).returncode
        == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of two megabytes."""
    place = tmp_path / "disk"
    if not mount(place, f"size={SMALL_DISK}"):
        for fault in ("the disk is full", "the disk is full while a report is written"):
            record_skipped(fault, "mounting a small file system needs root")
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    """A read-only folder; for root, who can write anywhere, a read-only file system."""
    place = tmp_path / "closed"
    if os.geteuid() != 0:
        place.mkdir(mode=0o555)
        yield place
    elif mount(place, "ro,size=4096"):
        yield place
        subprocess.run(["umount", str(place)], check=True)
    else:
        record_skipped(
            "a read-only folder",
            "root may write everywhere, and mounting is not allowed",
        )
        pytest.skip("root may write everywhere, and mounting is not allowed")


def fill(disk: Path, leave: int) -> Path:
    """Fill the disk except for some bytes."""
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    with ballast.open("wb") as file:
        file.write(b"\0" * max(0, free - leave))
    return ballast


@pytest.mark.parametrize(
    "leave", [0, 20_000, 40_000, 60_000, 80_000] if SCALE.parts > 1 else [0, 60_000]
)
@pytest.mark.parametrize("kind", ["server", "peers"])
def test_a_full_disk_raises_an_error_and_loses_nothing(
    tmp_path: Path, small_disk: Path, kind: str, leave: int
) -> None:
    module = {"module": seeded_net()} if kind == "server" else {}
    config = (
        small_config(rounds=6, **{"record.examples": True})
        if kind == "server"
        else config_of("hast(peers=2, depth=1)", **EVERYTHING)
    )
    start_run(config, tmp_path / "straight", **module)
    folder = small_disk / "run"
    ballast = fill(small_disk, leave)
    with pytest.raises(RunFailed, match="is full: nothing saved so far is lost; free some space"):
        start_run(config, folder, **module)
    ballast.unlink()
    if (folder / EXPERIMENT).exists():
        resume_run(folder, **module)
    else:
        start_run(config, folder, overwrite=True, **module)
    assert all_contents(folder) == all_contents(tmp_path / "straight")
    record_trial(
        "the disk is full",
        "an error message; the same bits when there was space",
        engine="sequential",
    )


def test_a_full_disk_keeps_the_old_report(tmp_path: Path, small_disk: Path) -> None:
    start_run(small_config(rounds=2), tmp_path / "run", module=seeded_net())
    page = small_disk / "report.html"
    page.write_text("the old page")
    with pytest.raises(RunFailed, match="is full"):  # the page has more than four megabytes
        write_report(tmp_path / "run", out=page)
    assert page.read_text() == "the old page"
    assert [path.name for path in small_disk.iterdir()] == ["report.html"]
    record_trial(
        "the disk is full while a report is written", "an error message; the old page remained"
    )


def test_a_read_only_folder_is_rejected(tmp_path: Path, closed_folder: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write to .*: choose another folder"):
        start_run(small_config(rounds=1), closed_folder / "run", module=seeded_net())
    start_run(small_config(rounds=1), tmp_path / "run", module=seeded_net())
    with pytest.raises(InputError, match="cannot write to"):
        write_report(tmp_path / "run", out=closed_folder / "report.html")
    assert list(closed_folder.iterdir()) == []
    record_trial("a read-only folder", "an error message, nothing written", 2)


def test_the_second_process_on_a_folder_is_rejected(tmp_path: Path) -> None:
    folder, config = tmp_path / "run", small_config()
    start_run(config, tmp_path / "straight", module=seeded_net())
    child = in_child(lambda: start_run(config, folder, module=seeded_net()))
    while not (folder / METRICS).exists() and child.is_alive():
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGSTOP)  # in the middle of its run
    refused = 0
    for attempt in (
        lambda: resume_run(folder, module=seeded_net()),
        lambda: start_run(config, folder, overwrite=True, module=seeded_net()),
    ):
        with pytest.raises(InputError, match="in use by another"):
            attempt()
        refused += 1
    os.kill(child.pid, signal.SIGCONT)
    child.join()
    assert contents(folder) == contents(tmp_path / "straight")
    record_trial(
        "two processes on one folder",
        "the second was rejected; the first ended as if alone",
        refused,
    )


@pytest.mark.parametrize("jump", [-1e9, -3600.0, 1e9])
def test_clocks_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """The wall clock goes backwards or far ahead; the run is interrupted and resumed."""
    start_run(small_config(rounds=6), tmp_path / "straight", module=seeded_net())
    real, begin = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: real() + (jump if real() - begin > 0.05 else 0.0))
    start_run(small_config(rounds=3), tmp_path / "run", module=seeded_net())
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (begin + jump, begin + jump) if begin + jump > 0 else (1, 1))
    resume_run(tmp_path / "run", rounds=6, module=seeded_net())
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial("the clock goes backwards", "the same bits")


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Background jobs of a shell ignore Ctrl-C; these tests must not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SIGNALS = {
    "Ctrl-C once": ((signal.SIGINT,), INTERRUPTED),
    "SIGTERM": ((signal.SIGTERM,), TERMINATED),
}


class Interrupting:
    """Sends signals from inside a run, after some round."""

    def __init__(self, after: int, number: int):
        self.after, self.number = after, number

    def start(self, title: str, done: int, total: int) -> None: ...
    def log(self, text: str) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...

    def round(self, line: dict[str, Any]) -> None:
        if line["round"] == self.after:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("kind", ["server", "peers"])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_saves(tmp_path: Path, name: str, kind: str) -> None:
    (number,), code = SIGNALS[name]
    module = {"module": seeded_net()} if kind == "server" else {}
    keys = {"checkpoint.seconds": 1000}
    config = (
        small_config(rounds=5, **keys)
        if kind == "server"
        else config_of("hast(peers=2, depth=1)", **EVERYTHING | keys)
    )
    start_run(config, tmp_path / "straight", **module)
    with pytest.raises(Stopped, match="all saved") as stop:
        start_run(config, tmp_path / "run", progress=Interrupting(3, number), **module)
    assert stop.value.exit_code == code
    assert contents(tmp_path / "run")["round"] == 3
    resume_run(tmp_path / "run", **module)
    assert all_contents(tmp_path / "run") == all_contents(tmp_path / "straight")
    record_trial(name, f"saved, exit code {code}, the same bits", engine="sequential")


def test_a_second_interrupt_ends_at_once_and_still_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C arrives while the first one saves: the checkpoint is complete or missing."""
    from remanence.core.safe_path import SafePath

    start_run(small_config(rounds=5), tmp_path / "straight", module=seeded_net())
    write, saves = SafePath.write_folder, []

    def interrupted(self: SafePath, files: dict[str, bytes]) -> None:
        saves.append(self.name)
        if len(saves) == 2:  # the first is that of round 0
            raise KeyboardInterrupt
        write(self, files)

    with monkeypatch.context() as patch:
        patch.setattr(SafePath, "write_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_run(
                small_config(rounds=5, **{"checkpoint.seconds": 1000}),
                tmp_path / "run",
                module=seeded_net(),
                progress=Interrupting(3, signal.SIGINT),
            )
    assert contents(tmp_path / "run")["round"] == 0
    resume_run(tmp_path / "run", module=seeded_net())
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial("Ctrl-C twice", "ended at once; the same bits", engine="sequential")


@pytest.mark.parametrize("name", [METRICS, LEDGER])
def test_files_shorter_than_in_the_checkpoint(tmp_path: Path, name: str) -> None:
    """As after a disk that lost flushed data: the newest checkpoint is skipped and the one before
    is used.
    """
    start_run(small_config(rounds=6), tmp_path / "straight", module=seeded_net())
    start_run(small_config(rounds=4), tmp_path / "run", module=seeded_net())
    path = tmp_path / "run" / name
    os.truncate(path, path.stat().st_size - 1)
    listening = Listening()
    resume_run(tmp_path / "run", rounds=6, module=seeded_net(), progress=listening)
    assert any(
        "round-0000004 is not used" in text and f"{name} has" in text for text in listening.said
    )
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial(
        "files that a checkpoint refers to are truncated",
        "reported; resumed from the one before, the same bits",
        engine="sequential",
    )


@pytest.mark.parametrize("after", [2, 4])
def test_late_replies_survive(tmp_path: Path, after: int) -> None:
    from rounds.test_decentralized import Dying

    config = parse_experiment(
        {},
        SLOW | {"method": "scaffold", "round.deadline": "quantile(share=0.6)", "round.late": "use"},
    )
    start_run(config, tmp_path / "straight")
    with pytest.raises(ConnectionAbortedError):
        start_run(config, tmp_path / "run", progress=Dying(after))
    resume_run(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "straight")
    record_trial(
        "late replies are outstanding when the run is killed", "the same bits", engine="sequential"
    )
