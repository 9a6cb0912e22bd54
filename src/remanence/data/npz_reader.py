"""Read NumPy's .npz archives that we do not trust: sizes are checked before memory is allocated,
and nothing is unpickled.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from remanence.core.errors import InputError
from remanence.data.files import damaged_file, size_of

LIMIT = 16 << 30  # all arrays together
_DEFLATE_AT_BEST = 1_100  # no deflate stream unpacks to more than about 1032 times its size
_KINDS = "biufU"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(path, members)
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


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    total = sum(member.file_size for member in members)
    if total > LIMIT:
        raise damaged_file(
            path,
            f"at most {size_of(LIMIT)} of arrays",
            f"{size_of(total)} declared",
            "split the data or store smaller types",
        )
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
        if member.file_size > _DEFLATE_AT_BEST * member.compress_size + 4096:
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


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    what = f"the array {member.filename!r:.60}"
    try:
        with archive.open(member) as file:
            version = npy.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version}")
            shape, _, dtype = (
                npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            )(file)
            data = member.file_size - file.tell()
        if dtype.kind not in _KINDS or dtype.hasobject:
            raise damaged_file(
                path,
                f"{what} of plain numbers or text",
                f"type {dtype}",
                "save plain arrays; Python objects are never unpickled",
            )
        if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != data:
            raise damaged_file(
                path,
                f"{what} of {shape} {dtype} with {math.prod(shape) * dtype.itemsize} bytes",
                f"{data} bytes",
                "save it again",
            )
        with archive.open(member) as file:
            return np.ascontiguousarray(npy.read_array(file, allow_pickle=False))
    except (ValueError, SyntaxError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged_file(
            path,
            f"{what} in numpy's format",
            f"something else ({error})",
            "save it again with numpy.savez",
        ) from None
