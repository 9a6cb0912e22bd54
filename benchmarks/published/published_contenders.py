"""Who runs a published job, and what one contender did."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contenders import Contender
from environments import CannotInstall, find_environment, make_environment
from turns import PATIENCE, SOURCE, find_error, start_driver

from remanence.core.errors import unknown

HERE = Path(__file__).parent
CORES = str(os.cpu_count() or 1)
# BlazeFL's threads work side by side only where Python has no global lock
NEWER_PYTHONS = ("python3.14t", "python3.13t", "python3.14", "python3.13", "python3.12")

CONTENDERS: dict[str, Contender] = {
    one.name: one
    for one in (
        Contender("remanence", "ours_published.py", "this package, engine `auto`"),
        Contender("plain", "plain_published.py", "PyTorch alone, data on the device"),
        Contender("pfl", "pfl_published.py", "pfl-research in one process", "pfl"),
        Contender(
            "pfl-processes",
            "pfl_published.py",
            "pfl-research, one process a core",
            "pfl",
            {"PEER_WORKERS": CORES, "OMP_NUM_THREADS": "1"},
        ),
        Contender(
            "blazefl",
            "blazefl_published.py",
            "BlazeFL, one worker a core",
            "blazefl",
            {"PEER_WORKERS": CORES, "OMP_NUM_THREADS": "1"},
        ),
    )
}


@dataclass
class Course:
    """How one contender's run went.

    Args:
        contender: Its name.
        versions: Of its packages.
        note: How it ran, such as the engine.
        before: Seconds until its first round could begin, imports not counted.
        seconds: From then to the end of each round and its evaluation.
        evaluations: Round, mean loss and accuracy on the test set.
        problem: Why there is no run.
        over: Whether it ended or was stopped.
    """

    contender: str
    versions: str = ""
    note: str = ""
    before: float = 0.0
    seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    problem: str = ""
    over: bool = False

    def hear(self, message: dict[str, Any]) -> None:
        """Take in a line of the contender."""
        if "round" not in message:
            self.versions, self.note = message["versions"], message["note"]
            self.before = message["seconds"]
            return
        self.seconds.append(message["seconds"])
        if message["accuracy"] is not None:
            self.evaluations.append((message["round"], message["loss"], message["accuracy"]))

    def seconds_a_round(self) -> float:
        """The median without the first round, in which engines choose and compile."""
        times = [b - a for a, b in zip([0.0, *self.seconds], self.seconds, strict=False)]
        return statistics.median(times[1:] or times)

    def seconds_to(self, accuracy: float) -> float | None:
        """From the start of round 1 to the end of the first evaluated round that reaches it."""
        return next(
            (
                self.seconds[number - 1]
                for number, _, found in self.evaluations
                if found >= accuracy
            ),
            None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_contenders(names: list[str], peer: str) -> list[Contender]:
    """Those of that name; without names ours, the plain loop, and the job's own package."""
    for name in names:
        if name not in CONTENDERS:
            raise unknown("contender", name, CONTENDERS)
    names = names or ["remanence", "plain", *(n for n in CONTENDERS if n.startswith(peer))]
    return [CONTENDERS[name] for name in dict.fromkeys(names)]


def find_interpreter(contender: Contender, envs: Path, python: str) -> str:
    """The Python of a contender, whose environment is made if necessary.

    Raises:
        CannotInstall: It cannot be made here.
    """
    if not contender.environment:
        return sys.executable
    if found := find_environment(contender.environment, envs):
        return str(found)
    if contender.environment == "blazefl":
        python = newer_python(python)
    return str(make_environment(contender.environment, envs, python))


def newer_python(python: str) -> str:
    """The given Python if it is 3.12 or newer, otherwise one that is."""
    for name in (python, *NEWER_PYTHONS):
        code = "import sys; sys.exit(sys.version_info < (3, 12))"
        found = shutil.which(name)
        if found and not subprocess.run([found, "-c", code], capture_output=True).returncode:
            return found
    raise CannotInstall("not installed: BlazeFL needs Python 3.12 or newer, give --python one")


class Player:
    """A contender's process, which runs a round for each line it gets."""

    def __init__(self, contender: Contender, python: str, folder: Path, course: Course):
        self.contender, self.course = contender, course
        environment = {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE.parent / "peers")])}
        if json.loads((folder / "task.json").read_text())["device"] == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process, self._log = start_driver(HERE, contender, python, folder, environment)

    def hear(self, seconds: float) -> None:
        """Take in its next line. Without one within `seconds`, it is stopped."""
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), self._kill()))
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            self.course.hear(json.loads(line))
        elif not late.is_set():
            self.course.problem = find_error(self._log.read_text(errors="replace"))
        elif not self.course.seconds:
            self.course.problem = f"no round within {seconds / 60:.3g} minutes"
        self.course.over |= not line

    def prepare(self) -> None:
        """Wait until it is ready for its first round."""
        self.hear(PATIENCE)

    def play(self, minutes: float) -> None:
        """One round of a run that takes at most `minutes`."""
        used = self.course.seconds[-1] if self.course.seconds else 0.0
        with suppress(OSError):  # it is gone: what it said last tells why
            print("go", file=self._process.stdin, flush=True)
        self.hear(max(1.0, 60 * minutes - used))

    def stop(self) -> None:
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # with the processes that it started
            os.killpg(self._process.pid, signal.SIGKILL)


def play_rounds(
    players: Sequence[Player], rounds: int, minutes: float, say: Callable[[str], None]
) -> None:
    """All of them a round each, then the next one, so that other work on the machine is unfair to
    all alike. Each begins one place further on.
    """
    for turn in range(rounds if players else 0):
        first = turn % len(players)
        for player in [*players[first:], *players[:first]]:
            course = player.course
            if course.over or (course.seconds and course.seconds[-1] >= 60 * minutes):
                continue
            player.play(minutes)
            say(f"  {player.contender.name}: {describe_progress(course)}")


def describe_progress(course: Course) -> str:
    if course.over:
        return course.problem or "stopped"
    if not course.seconds:
        return f"{course.note}; {course.before:.1f} s before the first round"
    number = len(course.seconds)
    text = f"round {number}, {course.seconds[-1]:.2f} s"
    if course.evaluations and course.evaluations[-1][0] == number:
        _, loss, accuracy = course.evaluations[-1]
        text += f", test loss {loss:.3f}, accuracy {accuracy:.4f}"
    return text
