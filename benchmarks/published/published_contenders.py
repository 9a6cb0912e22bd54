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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contenders import Contender
from environments import CannotInstall, find_environment, make_environment
from turns import SOURCE, find_error

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
    """

    contender: str
    versions: str = ""
    note: str = ""
    before: float = 0.0
    seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    problem: str = ""

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


def run_contender(
    contender: Contender,
    python: str,
    folder: Path,
    minutes: float,
    say: Callable[[str], None],
    course: Course,
) -> None:
    """Run one contender and take in its rounds as they come. It is stopped after so many minutes,
    and what it did until then counts.
    """
    hidden = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}  # everyone chooses threads by default
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(HERE.parent / "peers")])
    if json.loads((folder / "task.json").read_text())["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = folder / f"log-{contender.name}.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(HERE / contender.driver), str(folder), contender.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment | contender.settings,
            start_new_session=True,
        )

    late = threading.Event()

    def stop() -> None:
        late.set()
        with suppress(ProcessLookupError):  # with the processes that it started
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(60 * minutes, stop)
    timer.start()
    try:
        with process.stdout as lines:
            for line in lines:
                course.hear(json.loads(line))
                say(f"  {contender.name}: {describe_progress(course)}")
        if process.wait() and not late.is_set():
            course.problem = find_error(log.read_text(errors="replace"))
        elif not course.seconds:
            course.problem = f"no round within {minutes:g} minutes"
    finally:
        timer.cancel()
        stop()
        process.wait()


def describe_progress(course: Course) -> str:
    if not course.seconds:
        return f"{course.note}; {course.before:.1f} s before the first round"
    number = len(course.seconds)
    text = f"round {number}, {course.seconds[-1]:.2f} s"
    if course.evaluations and course.evaluations[-1][0] == number:
        _, loss, accuracy = course.evaluations[-1]
        text += f", test loss {loss:.3f}, accuracy {accuracy:.4f}"
    return text
