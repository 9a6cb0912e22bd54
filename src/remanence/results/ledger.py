"""The ledger: how many examples of each class each model predicts correctly, at every moment of a
round. Every forgetting measure is a function of its records.

One line of JSON, then fixed-width records: compact, append-only, readable by numpy without this
package. A last record that a crash has cut short is left out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remanence.core.errors import InputError
from remanence.core.files import write_atomically
from remanence.core.memory import check_memory, json_bytes
from remanence.core.safe_path import SafePath
from remanence.results.manifest import RunFile
from remanence.results.readers import check_records, corrupt_file, read_recorded

MOMENTS = ("before_drift", "before", "local", "merged", "refined", "personal")
SPLITS = ("test", "valid", "train", "public")
GLOBAL = -1  # in the column `model`: the global model
ALL = -1  # in the column `owner`: examples of all clients
FORMAT = 1


def record_type(classes: int) -> np.dtype:
    """One record: a model at a moment on the examples of an owner."""
    return np.dtype(
        [
            ("round", "<i4"),
            ("time_step", "<i4"),
            ("moment", "u1"),  # index into MOMENTS
            ("split", "u1"),  # index into SPLITS
            # a client's number, or GLOBAL; where there are several global models, -1, -2 and so on
            ("model", "<i4"),
            # of the examples: a client's number, or ALL; on the test split a concept's number,
            # where there are several
            ("owner", "<i4"),
            ("weight", "<f8"),  # the model's share in the aggregation; 0 for the global model
            ("loss", "<f8"),  # summed cross-entropy
            ("correct", "<i4", (classes,)),
            ("total", "<i4", (classes,)),
            ("predicted", "<i4", (classes,)),
        ]
    )


def confusion_type(classes: int) -> np.dtype:
    """One record of a whole confusion matrix: rows are true classes, columns predicted ones."""
    place = [(name, "<i4") for name in ("round", "time_step", "model", "owner")]
    return np.dtype(
        [*place, ("moment", "u1"), ("split", "u1"), ("confusion", "<i4", (classes, classes))]
    )


EXAMPLE = np.dtype(
    [
        ("round", "<i4"),
        ("time_step", "<i4"),
        ("moment", "u1"),  # index into MOMENTS: before, local or merged
        ("client", "<i4"),  # that holds the example
        ("id", "<i8"),
        ("correct", "u1"),
        ("margin", "<f4"),  # logit of the true class minus the largest other
    ]
)

PEER_COUNTS, SIMILARITY = 0, 1  # kinds of a record about peers
PEERS_AT_MOST = 200  # clients; with more, no tables over pairs of them are written


def peers_type(clients: int) -> np.dtype:
    """One record of a table over pairs of clients: how often k used the model of j since the
    record before, or how similar j seems to k.
    """
    return np.dtype(
        [
            ("round", "<i4"),
            ("time_step", "<i4"),
            ("kind", "u1"),
            ("values", "<f4", (clients, clients)),
        ]
    )


def make_record(classes: int, confusion: np.ndarray, **columns: Any) -> np.ndarray:
    """A record from a confusion matrix [C, C].

    Args:
        classes: C.
        confusion: True classes by predicted ones.
        columns: The other columns by name; moment and split as strings.
    """
    record = np.zeros(1, dtype=record_type(classes))
    record["correct"], record["total"], record["predicted"] = (
        np.diagonal(confusion),
        confusion.sum(axis=1),
        confusion.sum(axis=0),
    )
    record["moment"], record["split"] = (
        MOMENTS.index(columns.pop("moment")),
        SPLITS.index(columns.pop("split")),
    )
    for name, value in columns.items():
        record[name] = value
    return record


def header(class_names: Sequence[str]) -> bytes:
    """The first line of a ledger."""
    content = {
        "format": FORMAT,
        "class_names": list(class_names),
        "moments": MOMENTS,
        "splits": SPLITS,
    }
    return json.dumps(content).encode() + b"\n"


class Ledger:
    """A ledger read into memory: one numpy array of records, and views of it."""

    def __init__(self, records: np.ndarray, class_names: Sequence[str]):
        self.records, self.class_names = records, tuple(class_names)
        self.client_names: tuple[str, ...] = ()  # where clients are named sites

    @classmethod
    def read(cls, path: Path | SafePath, part: RunFile | None = None) -> Ledger:
        """Read a ledger.

        Args:
            path: Of the file.
            part: What it begins with, by the newest checkpoint of the run.
        """
        content = read_recorded(path, part)
        if content is None:
            raise InputError(
                f"no ledger at {path}: the run recorded none, or this is not a run folder"
            )
        start = content.find(b"\n") + 1
        check_memory(path, {"its first line": len(content) + json_bytes(content[:start])})
        try:
            first = json.loads(content[:start])
            if first["format"] != FORMAT:
                raise InputError(
                    f"{path} was written by another version (format {first['format']},"
                    f" this one reads {FORMAT})"
                )
            names = [str(name) for name in first["class_names"]]
            kind = record_type(len(names))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is not a ledger: its first line cannot be read") from None
        count = (len(content) - start) // kind.itemsize
        records = np.frombuffer(content, dtype=kind, count=count, offset=start)
        check_records(path, records, {"moment": len(MOMENTS), "split": len(SPLITS)})
        counts = records["correct"], records["total"], records["predicted"]
        if (
            any(bool((count < 0).any()) for count in counts)
            or bool((counts[0] > counts[1]).any())
            or not np.isfinite(records["weight"]).all()
        ):
            raise corrupt_file(
                path,
                "it has a negative count, more correct examples of a class than examples, or a"
                " weight that is not finite",
            )
        return cls(records, names)

    def select(
        self, *, moment: str | None = None, split: str | None = None, model: int | None = None
    ) -> np.ndarray:
        """The records at a moment, on a split, of a model."""
        keep = np.ones(len(self.records), dtype=bool)
        if moment is not None:
            keep &= self.records["moment"] == MOMENTS.index(moment)
        if split is not None:
            keep &= self.records["split"] == SPLITS.index(split)
        if model is not None:
            keep &= self.records["model"] == model
        return np.asarray(self.records[keep])

    def per_class(
        self, *, moment: str = "merged", split: str = "test"
    ) -> tuple[np.ndarray, np.ndarray]:
        """The global model's accuracy per class over rounds. -> rounds [T], accuracy [T, C]
        with NaN where there are no examples
        """
        records = self.select(moment=moment, split=split, model=GLOBAL)
        with np.errstate(invalid="ignore"):
            return records["round"], records["correct"] / np.where(
                records["total"] > 0, records["total"], np.nan
            )

    def to_pandas(self) -> Any:
        """The records as a pandas.DataFrame: a row for every record and class."""
        try:
            import pandas
        except ImportError:
            raise InputError(
                "to_pandas needs pandas: pip install 'remanence-fl[parquet]'"
            ) from None
        classes = len(self.class_names)
        flat = {
            name: np.repeat(self.records[name], classes)
            for name in ("round", "time_step", "model", "owner", "weight", "loss")
        }
        words = {
            "moment": np.repeat(np.array(MOMENTS)[self.records["moment"]], classes),
            "split": np.repeat(np.array(SPLITS)[self.records["split"]], classes),
            "class": np.tile(np.arange(classes), len(self.records)),
            "class_name": np.tile(np.array(self.class_names), len(self.records)),
        }
        counts = {
            name: self.records[name].reshape(-1) for name in ("correct", "total", "predicted")
        }
        if self.client_names:
            words["client_name"] = np.repeat(self._name_models(), classes)
        return pandas.DataFrame(flat | words | counts)

    def _name_models(self) -> np.ndarray:
        """The site whose model each record is about; empty for global models."""
        names = np.array([*self.client_names, ""])
        models = self.records["model"]
        return names[np.where((models >= 0) & (models < len(names) - 1), models, len(names) - 1)]

    def to_parquet(self, path: str | Path) -> Path:
        """Write the same as a Parquet file, for other tools. -> its path"""
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise InputError(
                "to_parquet needs pandas and pyarrow: pip install 'remanence-fl[parquet]'"
            ) from None
        content = io.BytesIO()
        self.to_pandas().to_parquet(content, index=False)
        write_atomically(Path(path), content.getvalue())
        return Path(path)


def check_run_numbers(
    path: SafePath, records: np.ndarray, clients: int, concepts: int, time_steps: int
) -> None:
    """Refuse records of clients, concepts and time steps that the run does not have: tables for
    them would not fit in memory.

    Args:
        path: Of the file, for errors.
        records: Of any file of fixed-width records.
        clients: Of the run.
        concepts: Of the run.
        time_steps: Of the run.
    """
    if not len(records):
        return
    fields = records.dtype.names or ()
    columns: dict[str, np.ndarray] = {
        name: records[name] for name in ("time_step", "model", "owner", "client") if name in fields
    }
    limits = {
        "time_step": time_steps,
        "model": clients,
        "owner": max(clients, concepts),
        "client": clients,
    }
    lowest = {"model": GLOBAL - clients, "owner": ALL}
    if "owner" in columns and "split" in fields:
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
