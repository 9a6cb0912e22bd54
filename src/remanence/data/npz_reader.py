"""Read NumPy's .npz archives that we do not trust: sizes are checked before memory is allocated,
and nothing is unpickled.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from remanence.core.errors import InputError
from remanence.core.memory import check_memory, size_of
from remanence.data.files import damaged_file

DEFLATE_AT_BEST = 1_100  # no deflate stream unpacks to more than about 1032 times its size
_KINDS = "biufU"
_LONGEST_HEADER = 10_000  # bytes; numpy's own limit, which it checks after reading
_LONGEST_DIRECTORY = 1 << 18  # bytes of the list of members, which zipfile reads at once
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"


class ArrayHeader(NamedTuple):
    """What the header of an array declares."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool  # Fortran's order, from which a copy is made

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


Headers = Mapping[str, ArrayHeader]


def read_npz(
    path: Path, later: Callable[[Headers], Mapping[str, int]] = lambda headers: {}
) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name.

    Args:
        path: The file.
        later: Returns the bytes that the caller will need besides the arrays, by what they are for.
    """
    try:
        _check_directory(path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(path, members)
            headers = {
                member.filename.removesuffix(".npy"): _read_header(path, archive, member)
                for member in members
            }
            arrays = sum(header.nbytes for header in headers.values())
            copied = [header.nbytes for header in headers.values() if header.columns_first]
            check_memory(
                path,
                {
                    "the arrays": arrays,
                    "a copy in C's order": max(copied, default=0),
                    **later(headers),
                },
            )
            return {
                member.filename.removesuffix(".npy"): _read_member(path, archive, member)
                for member in members
            }
    # the file is not damaged: the caller handles these
    except (IsADirectoryError, PermissionError, FileNotFoundError):
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        UnicodeDecodeError,
        EOFError,
        OSError,
        OverflowError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise damaged_file(
            path,
            "a complete .npz file",
            f"a broken one ({error})",
            "save it again with numpy.savez",
        ) from None


def _check_directory(path: Path) -> None:
    """Refuse a long list of members: zipfile makes an object of every one when it opens a file."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - (1 << 16) - 22))
        tail = file.read()
        at = tail.rfind(_END)
        if at < 0 or len(tail) - at < 22:
            return  # zipfile finds no archive
        declared = int.from_bytes(tail[at + 12 : at + 16], "little")
        if tail[max(0, at - 20) : at].startswith(_LOCATOR64):
            # zipfile expects the large record just before its locator
            declared = max(
                declared, _directory64(tail[: at - 20], file, size - len(tail) + at - 20)
            )
    if min(declared, size) > _LONGEST_DIRECTORY:
        raise damaged_file(
            path,
            "a list of a few arrays",
            f"one of {size_of(min(declared, size))}",
            "save it again with numpy.savez",
        )


def _directory64(before: bytes, file: IO[bytes], end: int) -> int:
    """The bytes of the list of members by the record for large archives, which ends at `end`."""
    if len(before) < 56 and end >= 56:
        file.seek(end - 56)
        before = file.read(56)
    record = before[-56:]
    return int.from_bytes(record[40:48], "little") if record.startswith(_END64) else 0


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if len({member.filename for member in members}) != len(members):
        raise damaged_file(
            path, "arrays with different names", "one name twice", "save it again with numpy.savez"
        )
    for member in members:
        if (
            not member.filename.endswith(".npy")
            or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            or member.flag_bits & 1
        ):
            raise damaged_file(
                path,
                "plain .npy arrays, stored or deflated",
                f"the member {member.filename!r:.60}",
                "save it again with numpy.savez",
            )
        if member.file_size > DEFLATE_AT_BEST * member.compress_size + 4096:
            found = (
                f"{member.filename!r:.60} with {member.compress_size} bytes that declare"
                f" {size_of(member.file_size)}"
            )
            raise damaged_file(
                path,
                "members with a plausible size",
                found,
                "save it again with numpy.savez",
            )


def _read_header(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ArrayHeader:
    what = f"the array {member.filename!r:.60}"
    try:
        with archive.open(member) as file:
            header, begin = _parse_header(file)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise _not_numpy(path, what, error) from None
    (shape, dtype, _), data = header, member.file_size - begin
    if dtype.kind not in _KINDS or dtype.hasobject or not dtype.itemsize:
        raise damaged_file(
            path,
            f"{what} of plain numbers or text",
            f"type {dtype}",
            "save plain arrays; Python objects are never unpickled",
        )
    if any(side < 0 for side in shape) or header.nbytes != data:
        raise damaged_file(
            path,
            f"{what} of {shape} {dtype} with {header.nbytes} bytes",
            f"{data} bytes",
            "save it again",
        )
    return header


def _parse_header(file: IO[bytes]) -> tuple[ArrayHeader, int]:
    """-> the header and its bytes. It is bounded here, since numpy reads all of it first."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version}")
    width = 2 if version == (1, 0) else 4
    prefix = file.read(width)
    length = int.from_bytes(prefix, "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    text = io.BytesIO(prefix + file.read(length))
    parse = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, columns_first, dtype = parse(text)
    return ArrayHeader(shape, dtype, columns_first), npy.MAGIC_LEN + width + length


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(member) as file:
            return np.ascontiguousarray(npy.read_array(file, allow_pickle=False))
    except (ValueError, SyntaxError, TypeError) as error:
        raise _not_numpy(path, f"the array {member.filename!r:.60}", error) from None


def _not_numpy(path: Path, what: str, error: BaseException) -> InputError:
    return damaged_file(
        path,
        f"{what} in numpy's format",
        f"something else ({error})",
        "save it again with numpy.savez",
    )
