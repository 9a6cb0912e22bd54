"""Append-only files of a run, beside the folder of its checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path

from remanence.core.files import FilePrefix

CONTENT = bytes(range(256))  # of every file


def make_checkpoint_folder(run: Path, *names: str) -> Path:
    """A run folder with files of this content -> the folder of its checkpoints."""
    (run / "checkpoints").mkdir(parents=True)
    for name in names:
        (run / name).write_bytes(CONTENT)
    return run / "checkpoints"


def prefixes(**lengths: int) -> dict[str, FilePrefix]:
    """The first bytes of these files: `prefixes(metrics_jsonl=3)`."""
    return {
        name.replace("_", "."): FilePrefix(length, hashlib.sha256(CONTENT[:length]))
        for name, length in lengths.items()
    }


def lengths_of(committed: dict[str, FilePrefix]) -> dict[str, tuple[int, str]]:
    """Lengths and hashes, to compare."""
    return {name: (part.length, part.sha256) for name, part in committed.items()}
