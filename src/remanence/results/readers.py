"""Reads the files of a run folder, which may come from another person, and checks them before
anything is computed: a file in another format is refused with an error of one sentence.

An incomplete last line or record, as a crash leaves it, is no error, and is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remanence.config.settings import MAX_ROUNDS, MAX_TIME_STEPS
from remanence.core.errors import InputError
from remanence.core.memory import check_memory, json_bytes
from remanence.core.safe_path import SafePath
from remanence.results.columns import NUMBERS, SHARES, SIGNED
from remanence.results.manifest import RunFile

LARGEST_TOML = 64 << 20  # bytes: a comparison of ten thousand runs lists every one of them
TOML_VALUE = 1000  # bytes of a table while it is parsed; a mark of a line may begin one
LARGEST_NUMBER = 1e300
LARGEST_GUESS = 1e100  # around which a search tries values
FARTHEST_POSITION = 40  # of a value that a search tries, in quarters of a magnitude from the guess
SEARCH_STAGES = ("half", "beyond", "quarter")
ROUNDING = 1e-9  # a weighted mean of shares may exceed 1 by this much
# of a run in a comparison; a path out of the comparison's folder does not match
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.=_-]{0,199}")


def corrupt_file(path: Path | SafePath, found: str) -> InputError:
    """The error for a file of a run that cannot be used."""
    return InputError(f"{path} is damaged: {found}; take it from a backup, or leave this run out")


def read_bytes(path: Path | SafePath, limit: int | None = None) -> bytes | None:
    """Read a whole file of a run; None where there is none.

    Args:
        path: Of the file.
        limit: The most bytes that it may have; None: what memory allows.
    """
    file = SafePath.of_file(path)
    try:
        status = file.status()
        if status is None:
            return None
        if limit is not None and status.st_size > limit:
            raise corrupt_file(path, f"it is larger than {limit} bytes")
        # the checks of its content make masks, and parsers copies
        check_memory(path, {"its content": 2 * status.st_size})
        return file.read(status.st_size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_recorded(path: Path | SafePath, part: RunFile | None) -> bytes | None:
    """Read an append-only file; None where there is none.

    Args:
        path: Of the file.
        part: What it begins with, by the newest checkpoint; None: nothing is known.

    Raises:
        InputError: It begins with something else.
    """
    content = read_bytes(path)
    if part is None:
        return content
    covered = memoryview(content or b"")[: part.bytes]
    if len(covered) < part.bytes:
        raise corrupt_file(
            path, f"it has {len(covered)} bytes, and the newest checkpoint covers {part.bytes}"
        )
    if hashlib.sha256(covered).hexdigest() != part.sha256:
        raise corrupt_file(
            path,
            f"it was changed: the SHA-256 of its first {part.bytes} bytes is not that in the newest"
            " checkpoint",
        )
    return content


def read_json(path: Path | SafePath, limit: int | None = None) -> Any:
    """Parse a JSON file, without checking its content or translating the errors of its text; None
    where there is no file.
    """
    content = read_bytes(path, limit)
    if content is None:
        return None
    check_memory(path, {"its content": json_bytes(content)})
    return json.loads(content)


def read_toml(path: Path | SafePath) -> dict[str, Any]:
    """Read a TOML file, without checking its content."""
    content = read_bytes(path, LARGEST_TOML)
    if content is None:
        raise InputError(f"cannot read {path}: there is no such file")
    marks = sum(content.count(mark) for mark in (b"=", b"[", b"{", b",", b"."))
    check_memory(path, {"its content": 2 * len(content), "its tables": TOML_VALUE * marks})
    try:
        return tomllib.loads(content.decode())
    # tomllib's own errors and wrong UTF-8 are ValueErrors
    except (ValueError, RecursionError) as error:
        raise corrupt_file(
            path, f"it is not valid TOML ({str(error) or type(error).__name__})"
        ) from None


def read_lines(path: Path | SafePath, part: RunFile | None = None) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl; a last one that a crash cut short is left out.

    Args:
        path: Of the file; no lines are returned where there is none.
        part: What it begins with, by the newest checkpoint.
    """
    content = read_recorded(path, part) or b""
    check_memory(path, {"its lines": len(content) + json_bytes(content)})
    raw = content.split(b"\n")
    texts = [(number, text) for number, text in enumerate(raw, 1) if text.strip()]
    lines: list[dict[str, Any]] = []
    for place, (number, text) in enumerate(texts):
        try:
            line = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            # without a line end: it was not written completely
            if place == len(texts) - 1 and number == len(raw):
                break
            raise corrupt_file(path, f"line {number} is not JSON ({str(error)[:80]})") from None
        problem = validate_metrics_row(line, len(lines[0].get("per_class") or []) if lines else 0)
        if problem:
            raise corrupt_file(path, f"line {number} {problem}")
        lines.append(line)
    return lines


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def validate_metrics_row(line: Any, classes: int = 0) -> str:
    """What is wrong with a line of metrics.jsonl; empty where nothing is.

    >>> validate_metrics_row({"round": 1, "model": "global", "split": "test", "accuracy": "high"})
    'has an accuracy that is not a number'

    Args:
        line: Parsed from JSON.
        classes: The number of classes in other lines; 0: unknown.
    """
    if not isinstance(line, dict):
        return "is not an object"
    if not (_is_whole(line.get("round")) and line["round"] >= 0):
        return "does not say which round it is of"
    for name in ("model", "split"):
        if not isinstance(line.get(name), str):
            return f"does not say which {name} it is of"
    for name in NUMBERS:
        if line.get(name) is not None and not _is_number(line[name]):
            return f"has {_article(name)} {name} that is not a number"
        if line.get(name) is not None and not _is_in_range(name, line[name]):
            limit = "0 to 1" if name in SHARES else "0 or more"
            return f"has {_article(name)} {name} of {line[name]:g}, and it is {limit}"
    shares = line.get("per_class")
    if shares is not None and not (
        isinstance(shares, list)
        and all(
            share is None or (_is_number(share) and _is_in_range("accuracy", share))
            for share in shares
        )
    ):
        return "has a per_class that is not a list of numbers from 0 to 1"
    if classes and shares and len(shares) != classes:
        return f"has {len(shares)} classes where others have {classes}"
    rejected, no_response = line.get("rejected") or [], line.get("no_response") or []
    if not (isinstance(rejected, list) and all(_is_rejection(entry) for entry in rejected)):
        return "has a list of rejected replies without their clients and codes"
    if not (isinstance(no_response, list) and all(map(_is_whole, no_response))):
        return "has a no_response that is not a list of clients"
    return ""


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST_NUMBER < value < LARGEST_NUMBER
    )


def _article(name: str) -> str:
    return "an" if name[0] in "aeio" else "a"


def _is_in_range(name: str, value: float) -> bool:
    highest = 1 + ROUNDING if name in SHARES else LARGEST_NUMBER
    return name in SIGNED or 0 <= value <= highest


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def _is_rejection(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and _is_whole(entry.get("client"))
        and isinstance(entry.get("code"), str)
    )


def _is_guarantee(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("unit", "basis"))
        and all(_is_number(entry.get(name)) for name in ("delta", "budget"))
    )


def read_records(
    path: Path | SafePath,
    kind: np.dtype,
    limits: Mapping[str, int],
    part: RunFile | None = None,
) -> np.ndarray | None:
    """Read fixed-width records; a last one that a crash cut short is left out.

    Args:
        path: Of the file; None is returned where there is none.
        kind: The type of a record.
        limits: By column: a number that all its values are below.
        part: What the file begins with, by the newest checkpoint.
    """
    raw = read_recorded(path, part)
    if raw is None:
        return None
    records = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], dtype=kind)
    check_records(path, records, limits)
    return records


def check_records(path: Path | SafePath, records: np.ndarray, limits: Mapping[str, int]) -> None:
    """Refuse records that no run writes: with rounds and time steps below 0 or too large, or
    values beyond the limits of their columns.
    """
    for name, limit in limits.items():
        if len(records) and int(records[name].max()) >= limit:
            raise corrupt_file(
                path, f"it has a {name} of {int(records[name].max())}, and there are {limit}"
            )
    if not len(records):
        return
    for name, limit in (("round", MAX_ROUNDS), ("time_step", MAX_TIME_STEPS)):
        if int(records[name].min()) < 0 or int(records[name].max()) > limit:
            raise corrupt_file(path, f"it has a {name} below 0 or above {limit}")


def read_table(path: Path | SafePath, rows: Any) -> list[list[int]]:
    """Parse whole numbers, one line for each client or time step: `["3 0 1", "0 2 2"]`."""
    if not isinstance(rows, list) or not all(
        isinstance(row, str) and re.fullmatch(r"(\d{1,9}( |$))*", row, re.ASCII) for row in rows
    ):
        raise corrupt_file(path, "a table in it holds something else than whole numbers")
    table = [[int(number) for number in row.split()] for row in rows]
    if any(len(row) != len(table[0]) for row in table):
        raise corrupt_file(path, "the lines of a table in it differ in length")
    return table


def check_metadata(path: Path | SafePath, metadata: Mapping[str, Any]) -> None:
    """Refuse metadata of the wrong type or size."""
    kinds: dict[str, type] = {
        **dict.fromkeys(("clients", "parameters", "rounds_per_step", "last_round"), int),
        **dict.fromkeys(("evaluated", "data", "engine", "kind", "remanence", "attackers"), str),
        **dict.fromkeys(("class_names", "shape", "mean", "std", "objects"), list),
        **dict.fromkeys(("concepts", "drift_notes", "guarantees"), list),
    }
    for name, kind in kinds.items():
        if name in metadata and (
            not isinstance(metadata[name], kind) or isinstance(metadata[name], bool)
        ):
            raise corrupt_file(path, f"about.{name} is {metadata[name]!r:.40}")
    for name in ("class_names", "objects", "concepts", "drift_notes"):
        if not all(isinstance(item, str) for item in metadata.get(name, [])):
            raise corrupt_file(path, f"about.{name} holds something else than strings")
    if not all(_is_guarantee(item) for item in metadata.get("guarantees", [])):
        raise corrupt_file(path, "about.guarantees holds something else than privacy guarantees")
    for name in ("shape", "mean", "std"):
        if not all(_is_number(item) for item in metadata.get(name, [])):
            raise corrupt_file(path, f"about.{name} holds something else than numbers")
    if not 1 <= metadata.get("clients", 1) < 2**24 or not all(
        1 <= side < 2**31 for side in metadata.get("shape", [])
    ):
        raise corrupt_file(path, "about.clients or about.shape is out of range")
    if (
        not 0 <= metadata.get("rounds_per_step", 0) < 2**31
        or not 0 <= metadata.get("parameters", 0) < 2**62
    ):
        raise corrupt_file(path, "about.rounds_per_step or about.parameters is out of range")


def check_plan(path: Path | SafePath, plan: Mapping[str, Any]) -> None:
    """Refuse a damaged plan of a comparison, and one that names a folder elsewhere."""
    cells, experiments = plan.get("cells"), plan.get("experiments")
    if not isinstance(cells, list) or not (experiments is None or isinstance(experiments, dict)):
        raise corrupt_file(path, "it does not list cells and experiments")
    for cell in cells:
        words = (
            [cell.get(name) for name in ("name", "method")] if isinstance(cell, dict) else [None]
        )
        if (
            not all(isinstance(word, str) for word in words)
            or not all(isinstance(cell.get(name, ""), str) for name in ("setting", "condition"))
            or not _is_whole(cell.get("seed"))
        ):
            raise corrupt_file(path, f"the cell {cell!r:.60} has no name, method or seed")
        if not FOLDER_NAME.fullmatch(str(words[0])):
            raise corrupt_file(path, f"the cell {words[0]!r:.60} is not the name of a folder")
        if experiments is not None and not isinstance(experiments.get(words[0]), dict):
            raise corrupt_file(path, f"the cell {words[0]!r:.60} has no experiment")
    engine, texts = plan.get("engine", {}), ("name", "reason", "execution")
    if not isinstance(engine, dict) or not all(
        isinstance(value, str) if name in texts else _is_whole(value)
        for name, value in engine.items()
    ):
        raise corrupt_file(path, "its engine is not a table of names and whole numbers")
    if not isinstance(plan.get("select", "all"), str) or not _is_whole(plan.get("batch_runs", 0)):
        raise corrupt_file(path, "its select or batch_runs has the wrong type")
    if "search" in plan:
        _check_search(path, plan["search"], {cell.get("setting", "") for cell in cells})


def _check_search(path: Path | SafePath, search: Any, settings: Collection[str]) -> None:
    """Refuse the table of a search that does not describe the values that the cells have."""
    tried = search.get("tried") if isinstance(search, dict) else None
    if (
        not isinstance(tried, list)
        or not settings
        or not isinstance(search.get("key"), str)
        or not (_is_number(search.get("around")) and 0 < search["around"] < LARGEST_GUESS)
        or not all(isinstance(entry, dict) and _is_tried_value(entry) for entry in tried)
        or {entry["setting"] for entry in tried} != settings
    ):
        raise corrupt_file(path, "its search does not describe the values of its cells")


def _is_tried_value(entry: Mapping[str, Any]) -> bool:
    return (
        _is_number(entry.get("value"))
        and _is_whole(entry.get("position"))
        and abs(entry["position"]) <= FARTHEST_POSITION
        and entry.get("stage") in SEARCH_STAGES
        and isinstance(entry.get("setting"), str)
    )
