"""Read a drift schedule from a user's CSV file, in bounded memory, with the line number in every
error message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.memory import check_memory, size_of

LIMIT = 8 << 20  # bytes of a file: a hundred thousand clients over ten time steps
LONG_FORM = ("time_step", "client", "cluster")
_CELL_BYTES = 60  # of a character while the table is parsed: a cell has two and becomes objects
_LineError = Callable[[int, str, str], InputError]


def read_table(path: Path) -> np.ndarray:
    """Read a schedule whose cells are separated by commas, semicolons or tabs.

    Returns:
        [T, K] int64 cluster numbers.

    Raises:
        InputError: the file is missing or malformed; the message names the line.
    """

    def error(line: int, found: str, cure: str) -> InputError:
        return InputError(f"line {line} of the drift table {path} {found}: {cure}")

    lines = _read_lines(path)
    separator = next((mark for mark in (",", ";", "\t") if mark in lines[0][1]), ",")
    rows = [(number, [cell.strip() for cell in line.split(separator)]) for number, line in lines]
    header = [cell.lower() for cell in rows[0][1]]
    long = sorted(header) == sorted(LONG_FORM)
    _check_cells(rows, long, error)
    numbers = [number for number, _ in rows[long:]]
    # [lines, cells]
    values = np.array([[int(cell) for cell in cells] for _, cells in rows[long:]], dtype=np.int64)
    _check_clusters(values[:, [header.index("cluster")]] if long else values, numbers, error)
    if not long:
        return values
    return _to_matrix(values[:, [header.index(name) for name in LONG_FORM]], numbers, error)


def _check_cells(rows: list[tuple[int, list[str]]], long: bool, error: _LineError) -> None:
    """Check that all lines have the same number of cells and that cells are whole numbers."""
    first, header = rows[0]
    for number, cells in rows:
        if len(cells) != len(header):
            raise error(
                number,
                f"has {len(cells)} cells where line {first} has {len(header)}",
                "give every line the same cells",
            )
    if long and len(rows) == 1:
        raise error(
            first,
            "is a header with nothing below it",
            "write a line for each time step and client",
        )
    for number, cells in rows[long:]:
        wrong = [cell for cell in cells if not re.fullmatch(r"\d{1,9}", cell, re.ASCII)]
        if wrong:
            raise error(
                number,
                f"has {wrong[0][:20]!r} where a number belongs"
                if wrong[0]
                else "has an empty cell",
                f"write whole numbers from 0, below no other header than {','.join(LONG_FORM)}",
            )


def _check_clusters(clusters: np.ndarray, numbers: list[int], error: _LineError) -> None:
    """Check that cluster numbers have no gap. clusters: [lines, cells]"""
    used = np.unique(clusters)
    if len(used) <= used[-1]:
        gap = int(np.argmax(used != np.arange(len(used))))
        raise error(
            numbers[int(np.argmax((clusters == used[gap]).any(axis=1)))],
            f"names cluster {used[gap]}, but no client is ever in cluster {gap}",
            "number the clusters 0, 1, 2, ... without a gap",
        )


def _to_matrix(triples: np.ndarray, numbers: list[int], error: _LineError) -> np.ndarray:
    """Convert (time step, client, cluster) [n, 3] to [T, K]; every pair of time step and client
    must occur once.
    """
    steps, clients = int(triples[:, 0].max()) + 1, int(triples[:, 1].max()) + 1
    cell = triples[:, 0] * clients + triples[:, 1]
    order = np.argsort(cell, kind="stable")
    repeated = np.flatnonzero(np.diff(cell[order]) == 0)
    if len(repeated):
        second = int(order[repeated + 1].min())
        step, client = triples[second, :2].tolist()
        raise error(
            numbers[second],
            f"places client {client} at time step {step} a second time",
            "remove one of the two lines",
        )
    # a cell is missing; tested before an array of steps * clients is allocated
    if len(triples) != steps * clients:
        absent = int(np.argmax(np.append(cell[order], -1) != np.arange(len(cell) + 1)))
        raise error(
            numbers[-1],
            f"is the last, and client {absent % clients} is nowhere at time step"
            f" {absent // clients}",
            f"write a line for each of {steps} time steps and {clients} clients",
        )
    return np.asarray(triples[order, 2].reshape(steps, clients))


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers from 1."""
    try:
        if not path.is_file():
            raise InputError(
                f"the drift table {path} was not found: correct path in table(path='...')"
            )
        read = min(path.stat().st_size, LIMIT)
        check_memory(f"the drift table {path}", {"its cells": _CELL_BYTES * read})
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"the drift table {path} cannot be read ({error.strerror}): check that you may read it"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the drift table {path} is not text: save it as CSV in UTF-8") from error
    if len(raw) > LIMIT:
        raise InputError(
            f"the drift table {path} is larger than {size_of(LIMIT)}: give a file with fewer"
            " time steps or clients"
        )
    lines = [
        (number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()
    ]
    if not lines:
        raise InputError(f"the drift table {path} is empty: write a line for each time step")
    return lines
