"""Remanence: what `rem.run(model=...)` calls, with a progress that reports every round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from published_networks import Center, make_network
from published_task import Reports, begin
from torch import nn

import remanence
from remanence.config import parse_experiment
from remanence.rounds.loop import start_run


class ReportedProgress:
    """A run's progress as lines of JSON."""

    def __init__(self, reports: Reports):
        self._reports, self._engine = reports, ""

    def start(self, title: str, done: int, total: int) -> None:
        versions = f"remanence {remanence.__version__}, torch {torch.__version__}"
        self._reports.start(versions, self._engine)

    def round(self, line: dict[str, Any]) -> None:
        self._reports.round(line["round"], line["loss"], line["accuracy"])

    def log(self, text: str) -> None:
        self._engine = self._engine or text.removeprefix("engine ")
        print(text)

    def note(self, text: str) -> None:
        print(text)

    def prepare(self, text: str) -> None:
        if text:
            print(text)

    def finish(self) -> None: ...


def main() -> None:
    task, reports = begin()
    network = make_network(task.network, task.classes)
    if not task.experiment.get("data.normalize", True):
        network = nn.Sequential(Center(), network)
    with tempfile.TemporaryDirectory(prefix="remanence-published-") as folder:
        start_run(
            parse_experiment({}, task.experiment),
            Path(folder) / "run",
            progress=ReportedProgress(reports),
            module=network,
        )


if __name__ == "__main__":
    main()
