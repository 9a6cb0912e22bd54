"""Attacks on a run folder, as a stranger or a bad disk would make them, and what every command must
still do: end with the numbers of the unbroken run, or refuse with a sentence that names a file.

A step is a tuple of numbers, so that a sequence can be drawn, shrunk and repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from rounds.test_resume import contents
from safetensors.torch import load_file
from trust.killing import count_lines, killed

from remanence.cli import runs as run_commands
from remanence.cli.main import main
from remanence.config import Experiment, parse_experiment
from remanence.core.errors import RemanenceError
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.run import CHECKPOINTS, EXPERIMENT, LEDGER, METRICS, Run
from remanence.results.trained_model import load_model
from remanence.rounds.loop import resume_run, start_run

FIRST, LONGER, MOST = 4, 6, 9  # rounds of the run, of `resume --rounds`, of the unbroken run
SECONDS = 20.0  # after which a command counts as one that hangs
MARK = "canary 7f3a91"  # in a file outside, which no command may show or copy
PHASES = ("training", "gate and server", "evaluation", "record", "checkpoint")
COMMANDS = ("resume", "resume longer", "evaluate", "export", "report")
Step = tuple[str, int, int, int]


class Hang(BaseException):
    """A command took longer than `SECONDS`."""


def config_of(**changes: Any) -> Experiment:
    keys = {
        "method": "scaffold",
        "model": "mlp(hidden='4')",
        "data.name": "synthetic(samples=60, classes=3, features=4)",
        "data.partition": "iid",
        "clients.count": 3,
        "clients.sample": 2,
        "rounds": FIRST,
        "engine": "sequential",
        "threads": 1,
        "device": "cpu",
        "local.batch_size": 10,
        "checkpoint.seconds": 0,
    }
    return parse_experiment({}, keys | changes)


def unbroken_rounds(config: Experiment, folder: Path) -> dict[int, dict[str, Any]]:
    """What a run that nobody touches holds after each round."""
    found = {}
    start_run(config.model_copy(update={"rounds": 1}), folder)
    for rounds in range(1, MOST + 1):
        if rounds > 1:
            resume_run(folder, rounds=rounds)
        params = load_model(Run(folder)).module.state_dict()
        found[rounds] = contents(folder) | {
            "params": {name: value.clone() for name, value in params.items()}
        }
    straight = start_run(config.model_copy(update={"rounds": MOST}), folder.with_name("straight"))
    assert contents(straight.folder) == {
        name: value for name, value in found[MOST].items() if name != "params"
    }
    return found


@dataclass
class Lab:
    """Runs that are made once: the ones to attack, the unbroken one, and files outside."""

    home: Path

    @cached_property
    def bases(self) -> list[Path]:
        """A finished run with a report and an exported model, and one that stopped early."""
        finished, stopped = self.home / "finished", self.home / "stopped"
        start_run(config_of(rounds=2), stopped)
        text = (stopped / EXPERIMENT).read_text().replace("rounds = 2\n", f"rounds = {FIRST}\n")
        (stopped / EXPERIMENT).write_text(text)
        start_run(config_of(), finished)
        assert run_command("export", finished).code == 0
        (finished / "report.html").write_text("an old page")  # a real one is large to copy
        return [finished, stopped]

    @cached_property
    def unbroken(self) -> dict[int, dict[str, Any]]:
        return unbroken_rounds(config_of(), self.home / "unbroken")

    @cached_property
    def outside(self) -> Path:
        """Another run with the same names of files, and a file with the mark."""
        folder = self.home / "outside" / "run"
        start_run(config_of(seed=1), folder)
        assert run_command("export", folder).code == 0
        (folder / "report.html").write_text("another page")
        (folder / "secret.txt").write_text(MARK)
        return folder

    @cached_property
    def lines(self) -> Counter[str]:
        """How many lines of each phase a resumed run executes."""
        folder = self.home / "counted"
        shutil.copytree(self.bases[1], folder)
        return count_lines(lambda: resume_run(folder, rounds=LONGER))

    def expected(self, config: Experiment) -> dict[int, dict[str, Any]]:
        """The unbroken run of an experiment file whose settings were changed and that has nothing
        else left of the run: it is another run. Empty where it evaluates only some rounds: the
        last one is always among them, so a run that ends earlier has other lines.
        """
        record = config.record
        if (record.every, record.local_every) != (1, 0):
            return {}
        if fingerprint(config) == fingerprint(config_of()):
            return self.unbroken
        folder = self.home / fingerprint(config)[:16]
        return unbroken_rounds(config, folder / "run") if not folder.exists() else {}


@dataclass
class Outcome:
    """What a command did."""

    command: str
    code: int
    out: str
    err: str


def run_command(command: str, folder: Path) -> Outcome:
    """Run a command as the shell would. A traceback or a hang is an AssertionError."""
    extra = {"evaluate": ["--json"], "resume": ["--quiet"]}.get(command, [])
    if command == "resume longer":
        command, extra = "resume", ["--quiet", "--rounds", str(LONGER)]
    out, err, code = io.StringIO(), io.StringIO(), 0

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            mock.patch.object(sys, "argv", ["remanence", command, str(folder), *extra]),
            # the page has a command of its own
            mock.patch.object(run_commands, "print_summary"),
        ):
            warnings.simplefilter("ignore")
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            main()
    except SystemExit as done:
        code = int(done.code or 0)
    except Hang:
        raise AssertionError(f"{command} hangs") from None
    except BaseException as error:
        raise AssertionError(f"{command} ends with a traceback: {error!r:.300}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(command, code, out.getvalue(), err.getvalue())


# ---------------------------------------------------------------------------------------- the steps


def entries_of(folder: Path) -> list[Path]:
    """Every file and folder of a run, without following links."""
    return sorted(path for path in folder.rglob("*") if path.name != ".lock")


def files_of(folder: Path) -> list[Path]:
    return [path for path in entries_of(folder) if path.is_file() and not path.is_symlink()]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def truncate(path: Path, number: int, lab: Lab, run: Path) -> None:
    os.truncate(path, number % (path.stat().st_size + 1))


def flip(path: Path, number: int, lab: Lab, run: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[number // 8 % len(content)] ^= 1 << number % 8
        path.write_bytes(content)


def edit_number(path: Path, number: int, lab: Lab, run: Path) -> None:
    """Another small number in place of one in a text."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return flip(path, number, lab, run)
    places = list(re.finditer(r"\d+(\.\d+)?", text))
    if places:
        place = places[number // 10 % len(places)]
        path.write_text(text[: place.start()] + str(number % 10) + text[place.end() :])
    return None


def replace_by_other_run(path: Path, number: int, lab: Lab, run: Path) -> None:
    other = lab.outside / path.relative_to(run)
    if other.is_file():
        shutil.copyfile(other, path)


def link(path: Path, number: int, lab: Lab, run: Path) -> None:
    """To the file of the same name of another run, to a secret, to a file that does not exist, or
    to a file or folder of this run.
    """
    inside = entries_of(run)
    targets = [
        lab.outside / path.relative_to(run),
        lab.outside / "secret.txt",
        lab.outside.parent / "nothing-there",
        inside[number % len(inside)],
    ]
    target = targets[number % len(targets)]
    remove(path)
    path.symlink_to(target)


def fifo(path: Path, number: int, lab: Lab, run: Path) -> None:
    remove(path)
    os.mkfifo(path)


def directory(path: Path, number: int, lab: Lab, run: Path) -> None:
    remove(path)
    path.mkdir()
    if number % 2:
        (path / "file").write_text("1")


def swap(path: Path, number: int, lab: Lab, run: Path) -> None:
    """With another entry, such as the same file of another round."""
    others = [p for p in entries_of(run) if p.name == path.name] if number % 2 else entries_of(run)
    other = others[number // 2 % len(others)]
    if path == other or path in other.parents or other in path.parents:
        return
    aside = run.with_name("aside")
    os.rename(path, aside)
    os.rename(other, path)
    os.rename(aside, other)


def move(path: Path, number: int, lab: Lab, run: Path) -> None:
    """Onto another entry, or to the name of another round."""
    if match := re.search(r"round-(\d{7})", path.name):
        target = path.with_name(path.name.replace(match[1], f"{number % (MOST + 1):07d}"))
    else:
        target = entries_of(run)[number % len(entries_of(run))]
    if target in (path, *path.parents) or path in target.parents:
        return
    remove(target)
    os.rename(path, target)


def delete(path: Path, number: int, lab: Lab, run: Path) -> None:
    remove(path)


def kill(path: Path, number: int, lab: Lab, run: Path) -> None:
    """Resume, and be killed at some line."""
    phase = PHASES[number % len(PHASES)]
    point = random.Random(number).randrange(lab.lines[phase])

    def resume() -> None:
        signal.alarm(int(SECONDS))  # the child of a folder with a named pipe may wait for ever
        with contextlib.suppress(Exception):
            resume_run(run, rounds=LONGER)

    killed(resume, phase, point)


# what a step does, and whether it needs a regular file
ATTACKS: dict[str, tuple[Callable[[Path, int, Lab, Path], None], bool]] = {
    "truncate": (truncate, True),
    "flip": (flip, True),
    "edit number": (edit_number, True),
    "replace by another run's": (replace_by_other_run, True),
    "link": (link, False),
    "fifo": (fifo, False),
    "directory": (directory, False),
    "swap": (swap, False),
    "move": (move, False),
    "delete": (delete, False),
    "kill": (kill, False),
}


def attack(run: Path, lab: Lab, step: Step) -> str:
    """Make a step; describe it."""
    name, which, number, _ = step
    function, needs_file = ATTACKS[name]
    entries = files_of(run) if needs_file else entries_of(run)
    if not entries:
        return f"{name}: nothing there"
    path = entries[which % len(entries)]
    experiment = run / EXPERIMENT
    was = experiment.read_bytes() if experiment.is_file() else b""
    function(path, number, lab, run)
    if asks_for_more_work(experiment):
        experiment.write_bytes(was)
    return f"{name} {path.relative_to(run)} ({number})"


def asks_for_more_work(experiment: Path) -> bool:
    """A folder that asks for many rounds gets them, which is no fault."""
    if not experiment.is_file() or experiment.is_symlink():
        return False
    asked = re.findall(rb"^\s*(?:rounds|time_steps)\s*=\s*(\d+)", experiment.read_bytes(), re.M)
    return any(int(number) > MOST for number in asked)


# ------------------------------------------------------------------------------------ the property


def digest(folder: Path) -> str:
    """Of all names and contents below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)} {path.is_symlink()}\n".encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def check(outcome: Outcome, run: Path, lab: Lab) -> str:
    """Check what a command did; describe it.

    Raises:
        AssertionError: The property does not hold.
    """
    shown = outcome.out + outcome.err
    assert "Traceback" not in shown, shown[-300:]
    assert MARK not in shown, f"{outcome.command} shows a file outside the folder"
    for path in files_of(run):
        assert MARK.encode() not in path.read_bytes(), f"{path.name} has a file from outside"
    if outcome.code:
        check_refusal(outcome, run)
        return "refused"
    checks = {"resume": check_resumed, "evaluate": check_evaluated, "export": check_exported}
    checks.get(outcome.command, check_reported)(outcome, run, lab)
    return "the unbroken run's result"


def check_refusal(outcome: Outcome, run: Path) -> None:
    sentence = outcome.err.partition("remanence: ")[2].strip()
    assert outcome.code in (1, 2), f"exit code {outcome.code}: {outcome.err[-300:]}"
    assert sentence, f"no sentence: {outcome.err[-300:]!r}"
    names = {run.name, EXPERIMENT, METRICS, LEDGER, CHECKPOINTS, "manifest.json", "report.html"}
    assert any(name in sentence for name in names), f"it names no file: {sentence:.300}"


def metrics_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: x for name, x in line.items() if name != "seconds"} for line in lines]


def check_resumed(outcome: Outcome, run: Path, lab: Lab) -> None:
    config = Run(run).config
    unbroken = lab.expected(config)
    if not unbroken:
        return
    store = CheckpointStore(run / CHECKPOINTS, fingerprint(config))
    state = store.load(torch.device("cpu"), lambda text: None)
    assert state is not None, "no checkpoint after resume"
    assert state.round == config.rounds, f"resumed to round {state.round} of {config.rounds}"
    wanted = {name: x for name, x in unbroken[state.round].items() if name != "params"}
    found = contents(run)
    for name, value in wanted.items():
        assert found[name] == value, f"after resume, {name} is not that of the unbroken run"


def check_evaluated(outcome: Outcome, run: Path, lab: Lab) -> None:
    found = json.loads(outcome.out)
    named = re.search(r"after round (\d+)", found["evaluated"])
    assert named, found
    unbroken = lab.expected(Run(run).config)
    if not unbroken:
        return
    line = next(
        line
        for line in unbroken[max(1, int(named[1]))]["metrics"]
        if (line["round"], line["split"]) == (int(named[1]), "test")
    )
    for name in ("accuracy", "per_class"):
        assert found[name] == line[name], f"{name} {found[name]} after round {named[1]}"
    assert np.isclose(found["loss"], line["loss"], rtol=1e-5), f"loss {found['loss']}"


def check_exported(outcome: Outcome, run: Path, lab: Lab) -> None:
    unbroken = lab.expected(Run(run).config)
    if not unbroken:
        return
    tensors = load_file(run / "export" / "model.safetensors")
    same = [
        rounds
        for rounds, found in unbroken.items()
        if all(torch.equal(tensors[name], value) for name, value in found["params"].items())
    ]
    assert same, "the exported model is that of no round"
    described = json.loads((run / "export" / "model.json").read_text())
    original = json.loads((lab.bases[0] / "export" / "model.json").read_text())
    for name in ("mean", "std", "shape", "class_names"):
        assert described[name] == original[name], f"model.json has another {name}"


def check_reported(outcome: Outcome, run: Path, lab: Lab) -> None:
    """The numbers of the page are those that `rem.load` reads. Those of rounds after the newest
    checkpoint are not compared: nothing else in the folder says what they were.
    """
    read, last = Run(run), newest_checkpoint(run)
    shown = [line for line in metrics_of(read.metrics) if line["round"] <= last]
    counts = b""
    with contextlib.suppress(RemanenceError):  # a page without the panels of a damaged ledger
        records = read.ledger.records
        counts = records[records["round"] <= last].tobytes()
    for unbroken in (lab.unbroken, lab.expected(read.config)):
        wanted = metrics_of(unbroken[MOST]["metrics"]) if unbroken else shown
        if shown == wanted[: len(shown)]:
            assert not unbroken or counts in unbroken[MOST]["ledger"], "the report has other counts"
            return
    raise AssertionError("the report has metrics that the unbroken run has not")


def newest_checkpoint(run: Path) -> int:
    """The last round of which the folder holds its own manifest; 0 where there is none."""
    rounds = [0]
    for path in (run / CHECKPOINTS).glob("round-*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            if path.is_file():  # no named pipe
                named = int(json.loads(path.read_text())["round"])
                rounds += [named] * (path.parent.name == f"round-{named:07d}")
    return max(rounds)


def play(lab: Lab, base: int, steps: list[Step]) -> Iterator[str]:
    """A sequence of attacks with a command after each marked step and at the end. Yields what
    happened, so that a failure has its history.
    """
    home = lab.home / "attacked"
    shutil.rmtree(home, ignore_errors=True)
    run = home / "run"
    shutil.copytree(lab.bases[base % len(lab.bases)], run)
    before = digest(lab.outside.parent)
    for number, step in enumerate(steps):
        yield attack(run, lab, step)
        if step[3] < len(COMMANDS) or number == len(steps) - 1:
            command = COMMANDS[step[3] % len(COMMANDS)]
            yield f"{command}: ..."
            yield check(run_command(command, run), run, lab)
            assert digest(lab.outside.parent) == before, f"{command} changes a file outside"
            assert [path.name for path in home.iterdir()] == ["run"], "something beside the folder"
