"""What a run left behind: `rem.load(DIR)`."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.config import Spec, make_spec
from remanence.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from remanence.metrics.ledger import Ledger

SPEC, METRICS, LEDGER, CONFUSIONS, EXAMPLES, PEERS, REPORT, CHECKPOINTS, COMPARISON, RUNS = (
    "spec.toml",
    "metrics.jsonl",
    "ledger.bin",
    "confusion.bin",
    "examples.bin",
    "peers.bin",
    "report.html",
    "checkpoints",
    "compare.toml",
    "runs",
)
ABOUT = "about"  # the table of spec.toml that holds what was chosen and seen, not asked for


@dataclass(frozen=True)
class Run:
    """A finished or unfinished run, read from its folder."""

    folder: Path

    @cached_property
    def _file(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / SPEC).read_text(encoding="utf-8"))

    @cached_property
    def spec(self) -> Spec:
        """What was asked for, with every choice settled."""
        return make_spec({name: value for name, value in self._file.items() if name != ABOUT})

    @cached_property
    def about(self) -> dict[str, Any]:
        """Versions, choices and facts of the data: class names, label counts of the clients, number of parameters."""
        about = dict(self._file.get(ABOUT, {}))
        about["label_counts"] = [[int(count) for count in row.split()] for row in about.get("label_counts", [])]  # written a line a client
        if "clusters" in about:
            about["clusters"] = [[int(cluster) for cluster in row.split()] for row in about["clusters"]]  # written a line a time step
        return about

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a crash cut short is left out."""
        lines = []
        path = self.folder / METRICS
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
        return lines

    def curve(self, split: str = "test", model: str = "", value: str = "accuracy") -> tuple[list[int], list[float]]:
        """A number over rounds -> rounds, values. Of the global model, or where clients have models of their own, of these; or of the one named."""
        model = model or self.about.get("evaluated", "global")
        points = [
            (line["round"], line[value])
            for line in self.metrics
            if line["split"] == split and line["model"] == model and line[value] is not None
        ]
        return [round for round, _ in points], [number for _, number in points]

    @cached_property
    def ledger(self) -> Ledger:
        """Counts per class, model and moment."""
        from remanence.metrics.ledger import Ledger

        return Ledger.read(self.folder / LEDGER)

    @cached_property
    def confusions(self) -> np.ndarray | None:
        """Whole confusion matrices, as `ledger.confusion_type` says; None where they were not recorded."""
        from remanence.metrics.ledger import confusion_type

        return _read_records(self.folder / CONFUSIONS, confusion_type(len(self.about["class_names"])))

    @cached_property
    def examples(self) -> np.ndarray | None:
        """Right or wrong, and by which margin, for every training row, as `ledger.EXAMPLE` says; None where it was not recorded."""
        from remanence.metrics.ledger import EXAMPLE

        return _read_records(self.folder / EXAMPLES, EXAMPLE)

    @cached_property
    def peers(self) -> np.ndarray | None:
        """Who listened to whom and who seemed how alike, as `ledger.peers_type` says; None with a server."""
        from remanence.metrics.ledger import peers_type

        return _read_records(self.folder / PEERS, peers_type(int(self.about["clients"])))

    def model(self, module: nn.Module | None = None, client: int | None = None) -> nn.Module:
        """The trained global model as an ordinary nn.Module, in evaluation mode; that of a client where clients have their own.

        `module` gives the network where the run was started with an object.
        """
        from remanence.export import load_model

        return load_model(self, module, client)

    @property
    def method(self) -> str:
        return self.spec.method

    @property
    def finished(self) -> bool:
        """Is the last round saved? Metrics may be ahead of what a killed run can go on from, a checkpoint never is."""
        newest = max((int(path.name.removeprefix("round-")) for path in (self.folder / CHECKPOINTS).glob("round-*")), default=0)
        return newest >= self.spec.total_rounds


@dataclass(frozen=True)
class Comparison:
    """Several runs of one experiment: methods x seeds (x grid)."""

    folder: Path

    @cached_property
    def plan(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / COMPARISON).read_text(encoding="utf-8"))

    @cached_property
    def runs(self) -> list[Run]:
        """The runs there are, in the order of the plan."""
        return [
            Run(self.folder / RUNS / cell["name"]) for cell in self.plan["cells"] if (self.folder / RUNS / cell["name"] / SPEC).exists()
        ]

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """The plan's cells: name, method (the label people read), seed and the settings tried."""
        return list(self.plan["cells"])


def _read_records(path: Path, kind: np.dtype) -> np.ndarray | None:
    """Fixed-width records; one that a crash cut short is left out."""
    if not path.exists():
        return None
    raw = path.read_bytes()
    return np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], dtype=kind)


def load(folder: str | Path) -> Run | Comparison:
    """Read a run folder or a comparison folder."""
    folder = Path(folder)
    if (folder / COMPARISON).is_file():
        return Comparison(folder)
    if (folder / SPEC).is_file():
        return Run(folder)
    if not folder.exists():
        raise InputError(f"no folder at {folder}: check the name")
    raise InputError(f"{folder} is neither a run nor a comparison: it has no {SPEC} and no {COMPARISON}")
