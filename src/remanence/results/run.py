"""Reads the folders of runs and comparisons: `rem.load(DIR)`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.config import Experiment, parse_experiment
from remanence.core.errors import InputError, unknown
from remanence.results.columns import COLUMNS
from remanence.results.readers import (
    check_metadata,
    check_plan,
    corrupt_file,
    read_lines,
    read_records,
    read_table,
    read_toml,
)

if TYPE_CHECKING:
    from torch import nn

    from remanence.results.ledger import Ledger

EXPERIMENT = "experiment.toml"
METRICS = "metrics.jsonl"
LEDGER = "ledger.bin"
CONFUSIONS = "confusion.bin"
EXAMPLES = "examples.bin"
PEERS = "peers.bin"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
COMPARISON = "compare.toml"
RUNS = "runs"
LARGEST_SIMILARITY = 1e15  # an inverse loss, and no loss counts as less than 1e-10
METADATA = "about"  # the table of experiment.toml that holds choices and data, not settings


class Metadata(dict[str, Any]):
    """The metadata of a run; reading an entry that is missing raises an `InputError`."""

    def __init__(self, path: Path, entries: Mapping[str, Any]):
        super().__init__(entries)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise corrupt_file(self.path, f"it has no {METADATA}.{name}")


@dataclass(frozen=True)
class Run:
    """A finished or unfinished run, read from its folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS

    @cached_property
    def _file(self) -> dict[str, Any]:
        return read_toml(self.folder / EXPERIMENT)

    @cached_property
    def config(self) -> Experiment:
        """The settings, with all defaults resolved."""
        settings = {name: value for name, value in self._file.items() if name != METADATA}
        with self.settings_named():
            return parse_experiment(settings)

    @contextmanager
    def settings_named(self) -> Iterator[None]:
        """Errors about the settings of this run begin with the path of their file."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.folder / EXPERIMENT}: {error}") from None

    @cached_property
    def metadata(self) -> Metadata:
        """Versions, choices and the data: class names, label counts of the clients, number of
        parameters.
        """
        path, metadata = self.folder / EXPERIMENT, self._file.get(METADATA, {})
        if not isinstance(metadata, dict):
            raise corrupt_file(path, f"{METADATA} is not a table")
        check_metadata(path, metadata)
        metadata = Metadata(path, metadata)
        # one line for each client
        metadata["label_counts"] = read_table(path, metadata.get("label_counts", []))
        if "clusters" in metadata:
            # one line for each time step
            metadata["clusters"] = table = read_table(path, metadata["clusters"])
            if max((max(row, default=0) for row in table), default=0) >= max(
                [1, len(metadata.get("concepts", [])), *map(len, table)]
            ):
                raise corrupt_file(path, "its clients are in clusters that it does not describe")
        return metadata

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a crash cut short is left out."""
        return read_lines(self.folder / METRICS)

    def curve(
        self, split: str = "test", model: str = "", value: str = "accuracy"
    ) -> tuple[list[int], list[float]]:
        """A column of metrics.jsonl over rounds.

        Args:
            split: test or valid.
            model: By default the global model, or the clients' own where they have any.
            value: The column, one of `results.columns.COLUMNS`.

        Returns:
            Rounds and values; rounds that were not evaluated are left out.
        """
        if value not in COLUMNS:
            raise unknown("column", value, COLUMNS)
        model = model or self.metadata.get("evaluated", "global")
        points = [
            (line["round"], line[value])
            for line in self.metrics
            if line["split"] == split and line["model"] == model and line.get(value) is not None
        ]
        return [round for round, _ in points], [number for _, number in points]

    @cached_property
    def ledger(self) -> Ledger:
        """Counts per class, model and moment."""
        from remanence.results.ledger import Ledger

        ledger = Ledger.read(self.folder / LEDGER)
        self._check_numbers(self.folder / LEDGER, ledger.records)
        return ledger

    @cached_property
    def confusions(self) -> np.ndarray | None:
        """Confusion matrices, as `ledger.confusion_type` defines them; None where they were not
        recorded.
        """
        from remanence.results.ledger import MOMENTS, SPLITS, confusion_type

        kind = confusion_type(len(self.metadata["class_names"]))
        return self._read(CONFUSIONS, kind, {"moment": len(MOMENTS), "split": len(SPLITS)})

    @cached_property
    def examples(self) -> np.ndarray | None:
        """Whether each training example is predicted correctly, and its margin, as
        `ledger.EXAMPLE` defines them; None where they were not recorded.
        """
        from remanence.results.ledger import EXAMPLE, MOMENTS

        return self._read(EXAMPLES, EXAMPLE, {"moment": len(MOMENTS), "correct": 2})

    @cached_property
    def peers(self) -> np.ndarray | None:
        """Which clients used whose models and how similar they seemed, as `ledger.peers_type`
        defines it; None with a server.
        """
        from remanence.results.ledger import PEERS_AT_MOST, SIMILARITY, peers_type

        if not (self.folder / PEERS).exists():
            return None
        clients = self.metadata["clients"]
        if clients > PEERS_AT_MOST:
            raise corrupt_file(
                self.folder / PEERS, f"a table over pairs of {clients} clients is never written"
            )
        records = self._read(PEERS, peers_type(clients), {"kind": SIMILARITY + 1})
        if (
            records is not None
            and not ((records["values"] >= 0) & (records["values"] < LARGEST_SIMILARITY)).all()
        ):
            raise corrupt_file(
                self.folder / PEERS, "it has counts or similarities that are negative or too large"
            )
        return records

    def model(self, module: nn.Module | None = None, client: int | None = None) -> nn.Module:
        """The trained model in evaluation mode.

        Args:
            module: The network, where the run was started with an object.
            client: Its model, where clients have models of their own.
        """
        from remanence.results.trained_model import load_model

        return load_model(self, module, client).module

    @property
    def networks(self) -> list[str]:
        """The network, as the settings name it."""
        return [self.config.model]

    def _read(self, name: str, kind: np.dtype, limits: dict[str, int]) -> np.ndarray | None:
        records = read_records(self.folder / name, kind, limits)
        if records is not None:
            self._check_numbers(self.folder / name, records)
        return records

    def _check_numbers(self, path: Path, records: np.ndarray) -> None:
        """Refuse records of clients, concepts and time steps that the run does not have: tables
        for them would not fit in memory.
        """
        from remanence.results.ledger import ALL, GLOBAL, SPLITS

        if not len(records):
            return
        columns: dict[str, np.ndarray] = {
            name: records[name]
            for name in ("time_step", "model", "owner", "client")
            if name in (records.dtype.names or ())
        }
        clients = int(self.metadata.get("clients", 2**24))
        clusters = self.metadata.get("clusters", [])
        concepts = max(
            [
                1,
                len(self.metadata.get("concepts", [])),
                *(1 + max(row, default=0) for row in clusters),
            ]
        )
        limits = {
            "time_step": max(1, len(clusters)),
            "model": clients,
            "owner": max(clients, concepts),
            "client": clients,
        }
        lowest = {"model": GLOBAL - clients, "owner": ALL}
        if "owner" in columns and "split" in (records.dtype.names or ()):
            columns["rows"], limits["rows"], lowest["rows"] = (
                columns["owner"][records["split"] == SPLITS.index("test")],
                concepts,
                ALL,
            )
        for name, values in columns.items():
            if (
                len(values)
                and not lowest.get(name, 0) <= int(values.min()) <= int(values.max()) < limits[name]
            ):
                raise corrupt_file(
                    path, f"it has a {name} {int(values.max())}, which the run does not have"
                )

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def finished(self) -> bool:
        """Whether the last round is saved in a checkpoint. The metrics of a killed run may be ahead
        of what it can resume from.
        """
        names = [path.name.removeprefix("round-") for path in self.checkpoints.glob("round-*")]
        newest = max(
            (int(name) for name in names if re.fullmatch(r"\d{1,9}", name, re.ASCII)), default=0
        )
        return newest >= self._last_round

    @property
    def reached_end(self) -> bool:
        """Whether the metrics go to the last round: also where checkpoints were deleted to save
        space.
        """
        return bool(self.metrics) and int(self.metrics[-1]["round"]) >= self._last_round

    @property
    def _last_round(self) -> int:
        """A privacy budget may end a run earlier than planned."""
        return int(self.metadata.get("last_round", self.config.total_rounds))


@dataclass(frozen=True)
class Comparison:
    """Several runs of one experiment: methods x seeds (x grid)."""

    folder: Path

    @cached_property
    def plan(self) -> dict[str, Any]:
        plan = read_toml(self.folder / COMPARISON)
        check_plan(self.folder / COMPARISON, plan)
        return plan

    @cached_property
    def runs(self) -> list[Run]:
        """The runs that have begun, in the order of the plan."""
        return [
            Run(self.folder / RUNS / cell["name"])
            for cell in self.plan["cells"]
            if (self.folder / RUNS / cell["name"] / EXPERIMENT).exists()
        ]

    @property
    def networks(self) -> list[str]:
        """The networks that the runs' settings name."""
        if "experiments" not in self.plan:
            raise corrupt_file(self.folder / COMPARISON, "it does not describe its runs")
        return sorted(
            {
                str(self.plan["experiments"][cell["name"]].get("model", ""))
                for cell in self.plan["cells"]
            }
        )

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """The plan's cells: name, method (the label that reports show), seed and settings."""
        return list(self.plan["cells"])


def load(folder: str | Path) -> Run | Comparison:
    """Read a run folder or a comparison folder."""
    folder = Path(folder)
    if (folder / COMPARISON).is_file():
        return Comparison(folder)
    if (folder / EXPERIMENT).is_file():
        return Run(folder)
    if not folder.exists():
        raise InputError(f"no folder at {folder}: check the name")
    raise InputError(
        f"{folder} is neither a run nor a comparison: it has no {EXPERIMENT} and no {COMPARISON}"
    )
