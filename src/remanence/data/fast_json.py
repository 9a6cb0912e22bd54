"""Parse JSON tables of plain decimals fast: LEAF stores images as hundreds of megabytes of text."""

from __future__ import annotations

import re

import numpy as np

from remanence.core.memory import json_bytes

_DOT, _ZERO, _NINE, _OPEN, _CLOSE = b".09[]"
_LONGEST = 20  # characters of one number: its 19 digits fit an int64 unless the first is a 9
_POWERS = 10.0 ** np.arange(_LONGEST)
# Of a character of a table while `read_decimals` parses it: three copies, and for each number, of
# two characters or more, eight arrays of eight bytes.
_CHARACTER_BYTES = 36
_FLAT_LIST = re.compile(r"\[[^\[\]{}]*\]")


def value_bytes(text: str, at: int) -> int:
    """Return the most memory that parsing the value at `at` takes, before it is parsed.

    Lists without others inside and tables of numbers have an end that is found fast; other values
    are assumed to end where the text ends.
    """
    flat = _FLAT_LIST.match(text, at)
    if flat:
        return json_bytes(flat.group())
    end = _table_end(text, at)
    if end > at and text.count("[", at, end) == text.count("]", at, end):
        # parsed as a table, or else as lists of Python's numbers
        return max(_CHARACTER_BYTES * (end - at), json_bytes(text[at:end]))
    return json_bytes(text[at:])


def _table_end(text: str, at: int) -> int:
    """The end of the table of numbers at `at`; 0: there is none."""
    # it has no quotes: it ends at the last bracket before the next quote
    quote = text.find('"', at)
    return text.rfind("]", at, quote if quote >= 0 else len(text)) + 1


def read_decimals(text: str, at: int, columns: int) -> tuple[np.ndarray, int] | None:
    """Parse the table `[[0.5, ...], ...]` that starts at `at`.

    Only numbers such as 0, 1.0 and 0.4941, with one digit before the point, are supported. Anything
    else (signs, exponents, rows of other lengths, damage) is left to the JSON parser.

    Returns:
        float64 [rows, columns] and the end of the table, or None if it is not supported.
    """
    end = _table_end(text, at)
    if end <= at or not text.startswith("[", at):
        return None
    packed = text[at:end].encode().translate(None, b" \t\r\n")
    marks = packed.translate(None, b".0123456789")
    rows = marks.count(b"[") - 1
    if rows < 1 or marks != b"[" + b",".join([b"[" + b"," * (columns - 1) + b"]"] * rows) + b"]":
        return None
    raw = np.frombuffer(packed, dtype=np.uint8)
    number = (raw >= _DOT) & (raw <= _NINE)
    # the table begins and ends with a bracket, so these come in pairs
    edges = np.flatnonzero(number[1:] != number[:-1]) + 1
    starts, ends = edges[0::2], edges[1::2]
    lengths = ends - starts
    # as many numbers as cells, and none between the brackets of two rows
    if (
        len(starts) != rows * columns
        or (raw[starts - 1] == _CLOSE).any()
        or (raw[ends] == _OPEN).any()
    ):
        return None
    longest = int(lengths.max())
    if longest > _LONGEST or (lengths == 2).any() or (raw[starts[lengths > 1] + 1] != _DOT).any():
        return None
    digits = raw[starts] - _ZERO  # uint8: a second point in a number becomes more than 9
    plain, values = bool((digits < 9).all()), digits.astype(np.int64)
    for place in range(2, longest):
        longer = np.flatnonzero(lengths > place)
        digits = raw[starts[longer] + place] - _ZERO
        plain &= bool((digits < 10).all())
        values[longer] = values[longer] * 10 + digits
    return (
        ((values / _POWERS[np.maximum(lengths - 2, 0)]).reshape(rows, columns), end)
        if plain
        else None
    )
