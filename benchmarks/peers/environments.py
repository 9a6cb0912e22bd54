"""One virtual environment a simulator, outside the tree, with every version pinned; made once
and kept.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

PINS = Path(__file__).parent / "pins"
# in the environment: what it was made from, so that a change of pins makes it anew
STAMP = "installed-pins.txt"
PATIENCE = 1800.0  # seconds for one call of pip
QUIETLY = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class CannotInstall(Exception):
    """Why a simulator does not take part."""


def find_environment(name: str, folder: Path) -> Path | None:
    """The interpreter of that environment, if it was made from today's pins."""
    interpreter, stamp = folder / name / "bin" / "python", folder / name / STAMP
    current = stamp.is_file() and stamp.read_text() == (PINS / f"{name}.txt").read_text()
    return interpreter if current and interpreter.exists() else None


def make_environment(name: str, folder: Path, python: str) -> Path:
    """The environment of that file of pins, below the folder. -> its interpreter"""
    if found := find_environment(name, folder):
        return found
    pins, home = (PINS / f"{name}.txt").read_text(), folder / name
    interpreter = home / "bin" / "python"
    call(python, "-m", "venv", "--clear", str(home))
    # torch comes first and alone: left to choose among versions, pip may fetch gigabytes of CUDA
    # packages.
    if torch := [line for line in pins.splitlines() if line.startswith("torch==")]:
        call(str(interpreter), *QUIETLY, *torch)
    call(str(interpreter), *QUIETLY, "--requirement", str(PINS / f"{name}.txt"))
    (home / STAMP).write_text(pins)
    return interpreter


def call(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"not installed: {error}") from None
    if done.returncode:
        raise CannotInstall(f"not installed: {find_reason(done.stderr or done.stdout)}")


def find_reason(output: str) -> str:
    """What pip gives as the first error, which names the package; else its last line.

    >>> find_reason("WARNING: x\\nERROR: No version of y\\nERROR: No matching distribution\\n")
    'No version of y'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["no reason given"])[0][:200]
