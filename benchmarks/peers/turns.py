"""One process a contender, and one of them at work at a time: they take turns, so that a busy
machine is unfair to all alike.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from contenders import PLAIN, Contender

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"  # peers use our networks, which need torch alone
PATIENCE = 1800.0  # seconds until a silent contender is given up
GRACE = 20.0  # seconds that it may take to end
# how far a first round may end from the plain loop's, relative to how far that one went; see GENTLY
# in job_folder.py
SAME = 0.01


class Failed(Exception):
    """Why a contender has no number."""


@dataclass
class Score:
    """What one contender did in one job."""

    contender: Contender
    versions: str = ""
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    difference: float | None = None  # from the plain loop, see SAME
    problem: str = ""


def start_driver(
    scripts: Path, contender: Contender, python: str, folder: Path, environment: dict[str, str]
) -> tuple[subprocess.Popen[str], Path]:
    """Launch a contender's script in a session of its own.

    Args:
        scripts: The folder of the script.
        contender: Whose script.
        python: The interpreter.
        folder: Of the job; gets the log.
        environment: Changes of the caller's environment.

    Returns:
        The process, which reads and writes lines, and the log of its errors.
    """
    # everyone chooses threads by default, whatever the caller's shell says
    hidden = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    log = folder / f"log-{contender.name}.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(scripts / contender.driver), str(folder), contender.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=inherited | environment | contender.settings,
            start_new_session=True,
        )
    return process, log


class Player:
    """A contender's process, which plays a round whenever it is told to."""

    def __init__(self, contender: Contender, python: str, folder: Path, patience: float = PATIENCE):
        self.score = Score(contender)
        self._patience = patience
        self._heard: queue.Queue[str] = queue.Queue()
        environment = {
            "PYTHONPATH": str(SOURCE),
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "FLWR_HOME": str(folder / "flower"),
        }
        self._process, self._log = start_driver(HERE, contender, python, folder, environment)
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def prepare(self) -> None:
        """Wait until it is ready."""
        message = self._hear()
        self.score.versions, self.score.note = message["versions"], message["note"]

    def play(self) -> float:
        """One round. -> seconds"""
        with suppress(OSError):  # it is gone: what it said last tells why
            print("go", file=self._process.stdin, flush=True)
        return float(self._hear()["seconds"])

    def stop(self) -> None:
        """Politely first: Flower has processes of its own to end."""
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        with suppress(ProcessLookupError):  # whatever is left of its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ear.join(GRACE)

    def _listen(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._heard.put(line)
        self._heard.put("")

    def _hear(self) -> dict[str, Any]:
        try:
            line = self._heard.get(timeout=self._patience)
        except queue.Empty:
            raise Failed(f"no answer within {self._patience:.0f} s") from None
        if not line:
            raise Failed(find_error(self._log.read_text(errors="replace")))
        message: dict[str, Any] = json.loads(line)
        return message


def play_job(
    contenders: Sequence[tuple[Contender, str]],
    folder: Path,
    repeat: int,
    say: Callable[[str], None],
    patience: float = PATIENCE,
) -> tuple[list[Score], KeyboardInterrupt | None]:
    """All of them, each with its interpreter, on the job in that folder; the first turn warms up
    and is compared with the plain loop, which is among them.

    -> what was measured, and what stopped it before its end, if anything did: what there is until
    then is not lost
    """
    players: list[Player] = []
    stop: KeyboardInterrupt | None = None
    try:
        with ExitStack() as stack:
            for contender, python in contenders:
                player = Player(contender, python, folder, patience)
                stack.callback(player.stop)
                players.append(player)
                say(f"  {contender.name}: starting")
                attempt(player, player.prepare)
            for turn in range(repeat + 1):
                first = turn % len(players)  # so that nobody always follows the same one
                for player in players[first:] + players[:first]:
                    if player.score.problem:
                        continue
                    seconds = attempt(player, player.play)
                    if seconds is not None:
                        say(
                            f"  {player.score.contender.name}: {seconds:.2f}"
                            f" s{'' if turn else ' (warming up)'}"
                        )
                        player.score.seconds += [seconds] if turn else []
    except KeyboardInterrupt as asked:
        stop = asked
    for player in players:
        if not player.score.seconds and not player.score.problem:
            player.score.problem = "stopped before a turn that counts"
        attempt(player, lambda player=player: compare(player.score, folder))
    return [player.score for player in players], stop


def attempt(player: Player, action: Callable[[], Any]) -> Any:
    """A contender that fails is out, and the others go on."""
    if player.score.problem:
        return None
    try:
        return action()
    except Failed as failure:
        player.score.problem = str(failure)
        return None


def compare(score: Score, folder: Path) -> None:
    """Did its first round end where the plain loop's did?"""
    start, plain, mine = (
        read(folder / name)
        for name in ("start.npz", f"result-{PLAIN.name}.npz", f"result-{score.contender.name}.npz")
    )
    if plain is None or start is None or mine is None:
        raise Failed("there is no first round of the plain loop to compare with")
    score.difference = distance(start, plain, mine)
    if not score.difference <= SAME:
        raise Failed(
            f"does other work: its first round ends {score.difference:.1%} away from the plain"
            " loop's"
        )


def read(path: Path) -> dict[str, np.ndarray] | None:
    if not path.is_file():
        return None
    with np.load(path) as file:
        return dict(file)


def distance(
    start: dict[str, np.ndarray], plain: dict[str, np.ndarray], mine: dict[str, np.ndarray]
) -> float:
    """How far two models are from each other, relative to how far the first one came from the
    start; infinity where names or shapes differ.

    >>> zero, one = np.zeros(1), np.ones(1)
    >>> distance({"w": zero}, {"w": 4 * one}, {"w": 5 * one})
    0.25
    """
    if {name: value.shape for name, value in plain.items()} != {
        name: value.shape for name, value in mine.items()
    }:
        return float("inf")
    apart = sum(float(((mine[name] - plain[name]).astype(np.float64) ** 2).sum()) for name in plain)
    moved = sum(
        float(((plain[name] - start[name]).astype(np.float64) ** 2).sum()) for name in plain
    )
    return float(np.sqrt(apart / moved))


def find_error(log: str) -> str:
    """The last line that reads like an exception; else the last line.

    >>> find_error("Traceback:\\nAttributeError: no tree_map\\n---\\n")
    'AttributeError: no tree_map'
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or [line for line in lines if line] or ["it ended without a word"])[-1][:200]
