"""How tests use the federation that `conftest.py` starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from indoors import small_spec

from remanence.config import Experiment, write_toml
from remanence.flower.app_files import write_app
from remanence.flower.processes import Federation

PATIENCE = "join_timeout=90 reply_timeout=90 ping_after=20 gone_after=100"
FAST = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1"}


@dataclass
class Ground:
    """The federation, and how tests use it."""

    folder: Path
    federation: Federation
    sites: dict[str, Path]
    apps: int = 0

    def prepare(self, specs: dict[str, Experiment]) -> Path:
        """An app around these experiments. -> its folder, whose name the run folder has too"""
        self.apps += 1
        source = self.folder / f"files-{self.apps}"
        source.mkdir()
        paths = []
        for name, spec in specs.items():
            paths.append(source / f"{name}.toml")
            paths[-1].write_text(write_toml(spec, {}))
        app = self.folder / f"app-{self.apps}"
        write_app(app, paths)
        return app

    def play(self, app: Path, seconds: float = 200.0, config: str = "", name: str = "run") -> str:
        """Run an app to its end. -> what it said"""
        self.federation.run(app, f"{PATIENCE} {config}", name=f"{name}-{app.name}").wait(seconds)
        return self.federation.log(f"{name}-{app.name}").read_text(errors="replace")

    def out(self, app: Path) -> Path:
        return self.folder / "runs" / app.name

    def log(self, app: Path, experiment: str = "") -> str:
        """What the coordinator wrote down."""
        path = self.out(app) / experiment / "federation.log"
        return path.read_text() if path.exists() else ""

    def worker_log(self, site: str) -> str:
        path = self.sites[site].parent / "state" / "worker.log"
        return path.read_text() if path.exists() else ""

    def processes(self, name: str, program: str) -> list[psutil.Process]:
        """Of what Flower started under one of our processes: those of this program."""
        found = psutil.Process(self.federation.processes[name].pid).children(recursive=True)
        return [
            process for process in found if any(program in word for word in process.cmdline()[:3])
        ]


def wait_until(happened: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"in {seconds:g} s it did not happen that {what}"
        time.sleep(0.05)


def lean(method: str, rounds: int, **changes: Any) -> Experiment:
    """The small experiment without counts of validation rows: a message less a round."""
    return small_spec(method, **{"record.validation": False, "rounds": rounds} | changes)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
