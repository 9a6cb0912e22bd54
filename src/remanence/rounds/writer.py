"""Writes the append-only files of a run: metrics.jsonl, the ledger, and single examples, confusion
matrices and tables over pairs of clients where they are recorded.

What follows the last checkpoint is cut off when a run is resumed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.safe_path import flush
from remanence.experiment.build import BuiltExperiment
from remanence.results.ledger import (
    ALL,
    EXAMPLE,
    MOMENTS,
    PEERS_AT_MOST,
    SPLITS,
    confusion_type,
    header,
    make_record,
    peers_type,
)
from remanence.results.run import CONFUSIONS, EXAMPLES, LEDGER, METRICS, PEERS
from remanence.rounds.records import Evaluation, ExampleRecords, ModelCounts, PeerTable, Record


class RunWriter:
    """The open files of a run.

    Args:
        folder: Of the run.
        experiment: Its settings name what is recorded.
        file_lengths: By file: its length at the last checkpoint; everything beyond is cut off.
    """

    def __init__(self, folder: Path, experiment: BuiltExperiment, file_lengths: Mapping[str, int]):
        self.record, self.classes = experiment.config.record, len(experiment.dataset.classes)
        self.clients = experiment.task.info.num_clients
        names = [METRICS, LEDGER]
        if experiment.is_decentralized and self.clients <= PEERS_AT_MOST:
            names.append(PEERS)
        if self.record.examples:
            names.append(EXAMPLES)
        if self.record.confusion:
            names.append(CONFUSIONS)
        self.files = {name: _open_at(folder / name, file_lengths.get(name, 0)) for name in names}
        if self.files[LEDGER].tell() == 0:
            self.files[LEDGER].write(header(experiment.dataset.classes))

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, ModelCounts):
                self._write_counts(record)
            elif isinstance(record, ExampleRecords):
                self._write_examples(record)
            else:
                self._write_peers(record)

    def write_evaluation(self, evaluation: Evaluation, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write the records, and a line of metrics.jsonl for each row.

        Returns:
            The line of the test split.
        """
        self.write(evaluation.records)
        lines = [row | metrics for row in evaluation.rows]
        for line in lines:
            self.files[METRICS].write(json.dumps(line, allow_nan=False).encode() + b"\n")
        return lines[0]

    def commit(self) -> dict[str, int]:
        """Flush to the operating system -> the lengths of the files, which belong to the state."""
        for file in self.files.values():
            file.flush()
        return {name: file.tell() for name, file in self.files.items()}

    def sync(self) -> None:
        """Flush to the disk, before a checkpoint records the lengths."""
        for file in self.files.values():
            flush(file)

    def close(self) -> None:
        """Close all files, also where the first cannot be written because the disk is full."""
        with contextlib.ExitStack() as stack:
            for file in self.files.values():
                stack.callback(file.close)

    def _write_counts(self, counts: ModelCounts) -> None:
        columns = {"owner": ALL} | counts.columns
        self.files[LEDGER].write(
            make_record(self.classes, counts.confusion, loss=counts.loss, **columns).tobytes()
        )
        if self.record.confusion and columns["split"] == "test":
            record = np.zeros(1, dtype=confusion_type(self.classes))
            record["moment"] = MOMENTS.index(columns["moment"])
            record["split"] = SPLITS.index("test")
            for name in ("round", "time_step", "model", "owner"):
                record[name] = columns[name]
            record["confusion"] = counts.confusion
            self.files[CONFUSIONS].write(record.tobytes())

    def _write_examples(self, examples: ExampleRecords) -> None:
        results, columns = examples.results, examples.columns
        records = np.zeros(len(results.ids), dtype=EXAMPLE)
        records["moment"] = MOMENTS.index(columns["moment"])
        records["client"], records["id"] = examples.clients[results.pair], results.ids
        records["correct"], records["margin"] = results.correct, results.margin
        for name in ("round", "time_step"):
            records[name] = columns[name]
        self.files[EXAMPLES].write(records.tobytes())

    def _write_peers(self, table: PeerTable) -> None:
        if PEERS not in self.files:
            return
        record = np.zeros(1, dtype=peers_type(self.clients))
        record["kind"], record["values"] = table.kind, table.values
        for name in ("round", "time_step"):
            record[name] = table.columns[name]
        self.files[PEERS].write(record.tobytes())


def _open_at(path: Path, length: int) -> Any:
    """Open for appending, with everything beyond the length cut off."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file
