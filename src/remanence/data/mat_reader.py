"""Read the uint8 arrays of MATLAB files (version 5) that we do not trust.

A file is a header of 128 bytes followed by elements: a kind, a number of bytes, and the bytes
padded to a multiple of eight. An element may be compressed with zlib. An array is an element of
elements: flags, dimensions, name and values. An element is decompressed only after the memory for
the size that it declares has been checked, and no further.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

HEADER = 128
INT8, UINT8, INT32, UINT32, MATRIX, PACKED = 1, 2, 5, 6, 14, 15  # element kinds
UINT8_CLASS = 9
MAX_ELEMENTS = 100  # at the top level of a file: SVHN has two
TAG = 8  # bytes of an element's kind and size


class UnsupportedFile(Exception):
    """The file has another format; the message is what was found."""


class Element(NamedTuple):
    kind: int
    content: memoryview


def read_arrays(
    raw: bytes, names: tuple[str, ...], check: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """Return the uint8 arrays with these names; other elements are skipped.

    Args:
        raw: The file.
        names: Of the arrays.
        check: Is called before an element is decompressed, with the bytes of all elements so far;
            raises if they are too many.
    """
    if len(raw) < HEADER or raw[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise UnsupportedFile("no header of MATLAB's format 5")
    order = "<" if raw[126:128] == b"IM" else ">"
    found: dict[str, np.ndarray] = {}
    unpacked = 0
    for count, element in enumerate(_walk(memoryview(raw)[HEADER:], order)):
        if count >= MAX_ELEMENTS:
            raise UnsupportedFile(f"more than {MAX_ELEMENTS} elements")
        if element.kind == PACKED:
            unpacked += _declared_size(element.content, order)
            check(unpacked)
            element = _unpack(element.content, order)
        if element.kind == MATRIX:
            name, array = _read_array(element.content, order, names)
            if name in found:
                raise UnsupportedFile(f"the array {name!r:.40} twice")
            if array is not None:
                found[name] = array
    return found


def _walk(content: memoryview, order: str) -> Iterator[Element]:
    """Yield the elements of a file or an element."""
    offset = 0
    while offset < len(content):
        if len(content) - offset < 8:
            raise UnsupportedFile(f"{len(content) - offset} bytes where an element should begin")
        kind, size = struct.unpack_from(f"{order}2I", content, offset)
        # a small element: number of bytes and kind in one word, then the bytes themselves
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            if size > 4:
                raise UnsupportedFile(f"a small element of {size} bytes")
            yield Element(kind, content[offset + 4 : offset + 4 + size])
            offset += 8
            continue
        if size > len(content) - offset - 8:
            raise UnsupportedFile(
                f"an element of {size} bytes where {len(content) - offset - 8} are left"
            )
        yield Element(kind, content[offset + 8 : offset + 8 + size])
        offset += 8 + (size if kind == PACKED else -(-size // 8) * 8)


def _declared_size(packed: memoryview, order: str) -> int:
    """The bytes that an element unpacks to, by its tag."""
    tag = _decompress(zlib.decompressobj(), packed[:4096], TAG)
    if len(tag) < TAG:
        raise UnsupportedFile("a packed element that is cut short")
    _, size = struct.unpack(f"{order}2I", tag)
    return TAG + int(size)


def _unpack(packed: memoryview, order: str) -> Element:
    """Decompress an element, which must contain one array."""
    unpacker = zlib.decompressobj()
    size = _declared_size(packed, order)
    content = _decompress(unpacker, packed, size + 1)
    if len(content) != size or not unpacker.eof:
        raise UnsupportedFile(
            "a packed element that is cut short or unpacks to more than it declares"
        )
    inside = list(_walk(memoryview(content), order))
    if len(inside) != 1 or inside[0].kind != MATRIX:
        raise UnsupportedFile("a packed element that holds something else than an array")
    return inside[0]


def _decompress(unpacker: zlib._Decompress, packed: memoryview, limit: int) -> bytes:
    try:
        return unpacker.decompress(packed, limit)
    except zlib.error as error:
        raise UnsupportedFile(f"a broken packed element ({error})") from None


def _read_array(
    content: memoryview, order: str, names: tuple[str, ...]
) -> tuple[str, np.ndarray | None]:
    """Return the name of an array, and its values if the name is one of `names`."""
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
    if not 2 <= len(shape) <= 8 or min(shape) < 0:
        raise UnsupportedFile(f"{name} of shape {shape}")
    values = next(parts, None)
    if values is None or values.kind != UINT8 or len(values.content) != size:
        raise UnsupportedFile(f"{name} of shape {shape} without its {size} bytes")
    return name, np.frombuffer(values.content, dtype=np.uint8).reshape(shape, order="F")
