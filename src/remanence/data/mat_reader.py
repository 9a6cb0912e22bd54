"""Reading the arrays of bytes in MATLAB's .mat files (version 5) from strangers: a page of code
that can be trusted, instead of a library that cannot.

A file is a header of 128 bytes and elements, each a kind, a number of bytes and that many bytes,
filled up to eight; an element may be packed by zlib. An array is an element of elements: flags,
dimensions, name and values. Nothing is unpacked beyond what the sizes of the arrays we look for
allow.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

HEADER = 128
INT8, UINT8, INT32, UINT32, MATRIX, PACKED = 1, 2, 5, 6, 14, 15  # kinds of elements
UINT8_CLASS = 9
MOST_ELEMENTS = 100  # at the top of a file: SVHN has two
OVERHEAD = 4096  # bytes of an array besides its values


class UnsupportedFile(Exception):
    """The file is not what we read; the message says what was found."""


class Element(NamedTuple):
    kind: int
    content: memoryview


def read_arrays(raw: bytes, names: tuple[str, ...], limit: int) -> dict[str, np.ndarray]:
    """The uint8 arrays of these names, of at most `limit` bytes each; other elements are passed
    over.
    """
    if len(raw) < HEADER or raw[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise UnsupportedFile("no header of MATLAB's format 5")
    order = "<" if raw[126:128] == b"IM" else ">"
    found: dict[str, np.ndarray] = {}
    for count, element in enumerate(_walk(memoryview(raw)[HEADER:], order)):
        if count >= MOST_ELEMENTS:
            raise UnsupportedFile(f"more than {MOST_ELEMENTS} elements")
        if element.kind == PACKED:
            element = _unpack(element.content, order, limit)
        if element.kind == MATRIX:
            name, array = _read_array(element.content, order, names, limit)
            if name in found:
                raise UnsupportedFile(f"the array {name!r:.40} twice")
            if array is not None:
                found[name] = array
    return found


def _walk(content: memoryview, order: str) -> Iterator[Element]:
    """Elements one after the other."""
    place = 0
    while place < len(content):
        if len(content) - place < 8:
            raise UnsupportedFile(f"{len(content) - place} bytes where an element should begin")
        kind, size = struct.unpack_from(f"{order}2I", content, place)
        # a small element: number of bytes and kind in one word, then the bytes themselves
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            if size > 4:
                raise UnsupportedFile(f"a small element of {size} bytes")
            yield Element(kind, content[place + 4 : place + 4 + size])
            place += 8
            continue
        if size > len(content) - place - 8:
            raise UnsupportedFile(
                f"an element of {size} bytes where {len(content) - place - 8} are left"
            )
        yield Element(kind, content[place + 8 : place + 8 + size])
        place += 8 + (size if kind == PACKED else -(-size // 8) * 8)


def _unpack(packed: memoryview, order: str, limit: int) -> Element:
    """The one element in a packed one; it grows with what is really there, never beyond the
    limit.
    """
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(packed, limit + OVERHEAD)
    except zlib.error as error:
        raise UnsupportedFile(f"a broken packed element ({error})") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise UnsupportedFile(
            "a packed element that is cut short or unpacks to more than the limit"
        )
    inside = list(_walk(memoryview(content), order))
    if len(inside) != 1 or inside[0].kind != MATRIX:
        raise UnsupportedFile("a packed element that holds something else than an array")
    return inside[0]


def _read_array(
    content: memoryview, order: str, names: tuple[str, ...], limit: int
) -> tuple[str, np.ndarray | None]:
    """-> its name, and its values where it is one we look for"""
    parts = _walk(content, order)
    head = [part for _, part in zip(range(3), parts, strict=False)]
    if (
        [part.kind for part in head] != [UINT32, INT32, INT8]
        or len(head[0].content) != 8
        or len(head[1].content) % 4
    ):
        raise UnsupportedFile("an array without flags, dimensions and name")
    flags, _ = struct.unpack(f"{order}2I", head[0].content)
    shape = struct.unpack(f"{order}{len(head[1].content) // 4}i", head[1].content)
    name = bytes(head[2].content).decode("latin-1")
    if name not in names:
        return name, None
    if flags & 0xFF != UINT8_CLASS or flags & 0x0800:  # another class, or complex numbers
        raise UnsupportedFile(f"{name} of another type than bytes")
    size = math.prod(shape)
    if not 2 <= len(shape) <= 8 or min(shape) < 0 or size > limit:
        raise UnsupportedFile(f"{name} of shape {shape}")
    values = next(parts, None)
    if values is None or values.kind != UINT8 or len(values.content) != size:
        raise UnsupportedFile(f"{name} of shape {shape} without its {size} bytes")
    return name, np.frombuffer(values.content, dtype=np.uint8).reshape(shape, order="F")
