"""Helpers for tests that use the federation that `conftest.py` starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from in_process import small_config

from remanence.config import Experiment, write_toml
from remanence.flower.app_files import write_app
from remanence.flower.processes import Federation

TIMEOUTS = "join_timeout=90 reply_timeout=90 ping_after=20 gone_after=100"
ENVIRONMENT = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1"}


@dataclass
class Harness:
    """The federation, its sites and its apps."""

    folder: Path
    federation: Federation
    sites: dict[str, Path]
    apps: int = 0

    def prepare(self, configs: dict[str, Experiment]) -> Path:
        """Write an app for these experiments. Returns its folder; the run folder has its name."""
        self.apps += 1
        source = self.folder / f"files-{self.apps}"
        source.mkdir()
        paths = []
        for name, config in configs.items():
            paths.append(source / f"{name}.toml")
            paths[-1].write_text(write_toml(config, {}))
        app = self.folder / f"app-{self.apps}"
        write_app(app, paths)
        return app

    def run(self, app: Path, seconds: float = 200.0, config: str = "", name: str = "run") -> str:
        """Run an app to its end. Returns its output."""
        self.federation.run(app, f"{TIMEOUTS} {config}", name=f"{name}-{app.name}").wait(seconds)
        return self.federation.log(f"{name}-{app.name}").read_text(errors="replace")

    def out(self, app: Path) -> Path:
        return self.folder / "runs" / app.name

    def log(self, app: Path, experiment: str = "") -> str:
        """The coordinator's event log."""
        path = self.out(app) / experiment / "federation.log"
        return path.read_text() if path.exists() else ""

    def daemon_log(self, site: str) -> str:
        path = self.sites[site].parent / "state" / "worker.log"
        return path.read_text() if path.exists() else ""

    def processes(self, name: str, program: str) -> list[psutil.Process]:
        """Children of one of the federation's processes that run this program."""
        found = psutil.Process(self.federation.processes[name].pid).children(recursive=True)
        return [
            process for process in found if any(program in word for word in process.cmdline()[:3])
        ]


def wait_until(condition: Callable[[], object], seconds: float, event: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"in {seconds:g} s this did not happen: {event}"
        time.sleep(0.05)


def lean(method: str, rounds: int, **changes: Any) -> Experiment:
    """The small experiment without validation counts, which saves a message a round."""
    return small_config(method, **{"record.validation": False, "rounds": rounds} | changes)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
