"""Reads the folders of runs and comparisons: `rem.load(DIR)`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remanence.config import Experiment, parse_experiment
from remanence.core.errors import InputError, SkippedCheckpoint, unknown
from remanence.core.safe_path import SafePath
from remanence.results.client_names import client_names
from remanence.results.columns import COLUMNS
from remanence.results.manifest import (
    CHECKPOINTS,
    LoadedCheckpoint,
    Manifest,
    RunFile,
    checkpoint_folders,
    newest_manifest,
    round_of,
)
from remanence.results.outcome import describe_outcome, why_nothing_learned
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
COMPARISON = "compare.toml"
SEARCH = "search"  # the table of a comparison's plan that says which values it tries, and why
RUNS = "runs"
LARGEST_SIMILARITY = 1e15  # an inverse loss, and no loss counts as less than 1e-10
METADATA = "about"  # the table of experiment.toml that holds choices and data, not settings


class Metadata(dict[str, Any]):
    """The metadata of a run; reading an entry that is missing raises an `InputError`."""

    def __init__(self, path: SafePath, entries: Mapping[str, Any]):
        super().__init__(entries)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise corrupt_file(self.path, f"it has no {METADATA}.{name}")


@dataclass(frozen=True, init=False)
class Run:
    """A finished or unfinished run, read from its folder.

    Args:
        folder: Of the run.
        resumed: The checkpoint from which `resume` has continued it.
    """

    files: SafePath  # the folder; its files are opened through it
    resumed: LoadedCheckpoint | None = field(compare=False)

    def __init__(self, folder: Path | SafePath, resumed: LoadedCheckpoint | None = None):
        object.__setattr__(self, "files", SafePath.of(folder))
        object.__setattr__(self, "resumed", resumed)

    @property
    def folder(self) -> Path:
        """The folder as a plain path, for messages."""
        return self.files.path

    @property
    def resumptions(self) -> list[tuple[str, LoadedCheckpoint]]:
        """The run by name with the checkpoint from which it was continued, if it was."""
        return [] if self.resumed is None else [(self.folder.name, self.resumed)]

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS

    @cached_property
    def _file(self) -> dict[str, Any]:
        return read_toml(self.files / EXPERIMENT)

    @cached_property
    def _newest_manifest(self) -> tuple[Manifest | None, list[str]]:
        return newest_manifest(self.files / CHECKPOINTS)

    @property
    def damaged_manifests(self) -> list[str]:
        """A sentence for each checkpoint newer than the newest one whose manifest can be read."""
        return self._newest_manifest[1]

    def recorded_part(self, name: str) -> RunFile | None:
        """What an append-only file begins with, by the newest checkpoint. It is read before the
        file, which may grow.
        """
        manifest = self._newest_manifest[0]
        return None if manifest is None else manifest.run_files.get(name)

    def has_recorded(self, name: str) -> bool:
        """Whether there is an append-only file, or a checkpoint that says so."""
        return self.recorded_part(name) is not None or (self.files / name).is_regular_file()

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
        path, metadata = self.files / EXPERIMENT, self._file.get(METADATA, {})
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
        return read_lines(self.files / METRICS, self.recorded_part(METRICS))

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

        ledger = Ledger.read(self.files / LEDGER, self.recorded_part(LEDGER))
        ledger.client_names = client_names(self.metadata)
        self._check_numbers(self.files / LEDGER, ledger.records)
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

        if not self.has_recorded(PEERS):
            return None
        clients = self.metadata["clients"]
        if clients > PEERS_AT_MOST:
            raise corrupt_file(
                self.files / PEERS, f"a table over pairs of {clients} clients is never written"
            )
        records = self._read(PEERS, peers_type(clients), {"kind": SIMILARITY + 1})
        if (
            records is not None
            and not ((records["values"] >= 0) & (records["values"] < LARGEST_SIMILARITY)).all()
        ):
            raise corrupt_file(
                self.files / PEERS, "it has counts or similarities that are negative or too large"
            )
        return records

    def model(self, module: nn.Module | None = None, client: int | None = None) -> nn.Module:
        """The trained model in evaluation mode. A warning names the checkpoint that was read where
        it is not the newest one.

        Args:
            module: The network, where the run was started with an object.
            client: Its model, where clients have models of their own.
        """
        from remanence.results.trained_model import load_model

        trained = load_model(self, module, client)
        if trained.checkpoint.skipped:
            warnings.warn(trained.checkpoint.describe(), SkippedCheckpoint, stacklevel=2)
        return trained.module

    @cached_property
    def learned(self) -> bool:
        """Whether any recorded round changed a model; without one, the model is the untrained
        one. True where no round is recorded yet.
        """
        return not why_nothing_learned(self.metrics)

    @cached_property
    def warnings(self) -> list[str]:
        """Why the numbers of this run are not what they seem: it learned nothing, or diverged."""
        return describe_outcome(self.metrics, self.attackers)

    @property
    def attackers(self) -> list[int]:
        """The hostile clients."""
        named = str(self.metadata.get("attackers", "")).split()
        return [int(client) for client in named if client.isdecimal()]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of its experiment, as nested tables."""
        return self.config.model_dump(mode="json")

    def _read(self, name: str, kind: np.dtype, limits: dict[str, int]) -> np.ndarray | None:
        part = self.recorded_part(name)
        records = read_records(self.files / name, kind, limits, part)
        if records is not None:
            self._check_numbers(self.files / name, records)
        return records

    def _check_numbers(self, path: SafePath, records: np.ndarray) -> None:
        """Refuse records of clients, concepts and time steps that the run does not have."""
        from remanence.results.ledger import check_run_numbers

        known, clusters = self.metadata, self.metadata.get("clusters", [])
        named = (1 + max(row, default=0) for row in clusters)
        concepts = max([1, len(known.get("concepts", [])), *named])
        clients, time_steps = int(known.get("clients", 2**24)), max(1, len(clusters))
        check_run_numbers(path, records, clients, concepts, time_steps)

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def finished(self) -> bool:
        """Whether the last round is saved in a checkpoint. The metrics of a killed run may be ahead
        of what it can resume from.
        """
        folders = checkpoint_folders(self.files / CHECKPOINTS)
        return max(map(round_of, folders), default=0) >= self._last_round

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


@dataclass(frozen=True, init=False)
class Comparison:
    """Several runs of one experiment: methods x seeds (x grid).

    Args:
        folder: Of the comparison.
        resumptions: The runs that `resume` has continued, by name, and from which checkpoints.
    """

    files: SafePath  # the folder; its files are opened through it
    resumptions: Sequence[tuple[str, LoadedCheckpoint]] = field(compare=False)

    def __init__(
        self, folder: Path | SafePath, resumptions: Sequence[tuple[str, LoadedCheckpoint]] = ()
    ):
        object.__setattr__(self, "files", SafePath.of(folder))
        object.__setattr__(self, "resumptions", resumptions)

    @property
    def folder(self) -> Path:
        """The folder as a plain path, for messages."""
        return self.files.path

    @cached_property
    def plan(self) -> dict[str, Any]:
        plan = read_toml(self.files / COMPARISON)
        check_plan(self.files / COMPARISON, plan)
        return plan

    @cached_property
    def runs(self) -> Sequence[Run]:
        """The runs that have begun, in the order of the plan."""
        folders = [self.files / RUNS / cell["name"] for cell in self.plan["cells"]]
        return [Run(folder) for folder in folders if (folder / EXPERIMENT).is_regular_file()]

    @property
    def learned(self) -> bool:
        """Whether every run learned something, see `Run.learned`."""
        return all(run.learned for run in self.runs)

    @property
    def warnings(self) -> list[str]:
        """The warnings of its runs, see `Run.warnings`, each with method, setting and seed."""
        names = {
            cell["name"]: ", ".join(
                filter(None, [cell["method"], cell.get("setting"), f"seed {cell['seed']}"])
            )
            for cell in self.cells
        }
        return [f"{names[run.folder.name]} {text}" for run in self.runs for text in run.warnings]

    @property
    def settings(self) -> list[Any]:
        """All settings: those of its plan, and those that its runs have stored themselves."""
        if "experiments" not in self.plan:
            raise corrupt_file(self.files / COMPARISON, "it does not describe its runs")
        return [self.plan, *(run.settings for run in self.runs)]

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """The plan's cells: name, method (the label that reports show), seed and settings."""
        return list(self.plan["cells"])


def load(folder: str | Path | SafePath) -> Run | Comparison:
    """Read a run folder or a comparison folder."""
    files = folder if isinstance(folder, SafePath) else SafePath(Path(folder))
    if (files / COMPARISON).is_regular_file():
        return Comparison(files)
    if (files / EXPERIMENT).is_regular_file():
        return Run(files)
    if not files.is_folder():
        raise InputError(f"no folder at {files}: check the name")
    raise InputError(
        f"{files} is neither a run nor a comparison: it has no {EXPERIMENT} and no {COMPARISON}"
    )
