"""Writes the append-only files of a run: metrics.jsonl, the ledger, and single examples, confusion
matrices and tables over pairs of clients where they are recorded.

What follows the last checkpoint is cut off when a run is resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from remanence.core.errors import CheckpointError
from remanence.core.files import FilePrefix
from remanence.core.safe_path import SafePath, flush
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


class RecordFile:
    """An append-only file, hashed while it is written.

    Args:
        path: Of the file.
        committed: What it keeps; everything beyond is cut off.
    """

    def __init__(self, path: SafePath, committed: FilePrefix):
        self.file = path.open_at(committed.length)
        self.length, self.hash = committed.length, committed.hash.copy()

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.length += len(content)
        self.hash.update(content)

    def commit(self) -> FilePrefix:
        """Flush to the operating system -> what has been written."""
        self.file.flush()
        return FilePrefix(self.length, self.hash.copy())

    def close(self) -> None:
        self.file.close()


class RunWriter:
    """The open files of a run.

    Args:
        folder: Of the run.
        experiment: Its settings name what is recorded.
        committed: The part of each file that belongs to the last checkpoint; everything beyond is
            cut off. None: there is no checkpoint.
    """

    def __init__(
        self,
        folder: SafePath,
        experiment: BuiltExperiment,
        committed: Mapping[str, FilePrefix] | None = None,
    ):
        self.record, self.classes = experiment.config.record, len(experiment.dataset.classes)
        self.clients = experiment.task.info.num_clients
        names = [METRICS, LEDGER]
        if experiment.is_decentralized and self.clients <= PEERS_AT_MOST:
            names.append(PEERS)
        if self.record.examples:
            names.append(EXAMPLES)
        if self.record.confusion:
            names.append(CONFUSIONS)
        if committed is not None and committed.keys() != set(names):
            raise CheckpointError(
                f"the checkpoint of {folder} belongs to {', '.join(sorted(committed))}, but this"
                f" experiment writes {', '.join(sorted(names))}"
            )
        kept = committed or dict.fromkeys(names, FilePrefix(0, hashlib.sha256()))
        self.files = {name: RecordFile(folder / name, kept[name]) for name in names}
        if committed is None:
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

    def commit(self) -> dict[str, FilePrefix]:
        """Flush to the operating system -> what the files hold, which belongs to the state."""
        return {name: file.commit() for name, file in self.files.items()}

    def sync(self) -> None:
        """Flush to the disk, before a checkpoint records the lengths."""
        for file in self.files.values():
            flush(file.file)

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
