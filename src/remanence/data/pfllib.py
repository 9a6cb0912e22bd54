"""Folders of PFLlib (Zhang et al. 2025): train/0.npz, train/1.npz, ... and test/0.npz, ..., one
file for each client. The files hold a pickled dictionary, which is read without running it.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from remanence.core.errors import InputError
from remanence.core.expressions import PlainText
from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, dataset_bytes
from remanence.data.files import damaged_file, resolve
from remanence.data.own_arrays import LabeledArrays, assemble, check_kind
from remanence.data.restricted_pickle import load_number_arrays, pickle_bytes

_HEADER = 4096  # bytes in which the pickle of an array begins


def pfllib(root: Path | None, *, path: str = "", kind: PlainText = "") -> ArrayDataset:
    """A folder of PFLlib: train/0.npz, ... and test/0.npz, ...; each file is a client.

    Args:
        root: the data folder.
        path: the folder, absolute or below the data folder or the current folder.
        kind: "image", "table", "tokens", "sequence" or "volume"; default: by axes and type.
    """
    check_kind(kind, "pfllib")
    folder = resolve("pfllib", root, path)
    parts = [_read_part(folder / part) for part in ("train", "test") if (folder / part).is_dir()]
    return assemble(
        str(folder),
        parts,
        kind=kind,
        by_site=True,
        note=f"The clients of {folder.name}, a folder of PFLlib.",
        name=folder.name,
    )


def client_files(folder: Path) -> list[Path]:
    """The files of the clients in a part of a folder, by number."""
    files = [file for file in folder.glob("*.npz") if file.stem.isdecimal()]
    return sorted(files, key=lambda file: int(file.stem))


def _read_part(folder: Path) -> LabeledArrays:
    files = client_files(folder)
    if not files:
        raise InputError(f"dataset 'pfllib' found no files 0.npz, 1.npz, ... in {folder}")
    arrays: list[tuple[np.ndarray, np.ndarray]] = []
    for file in files:
        held = sum(x.nbytes for x, _ in arrays)
        arrays.append(_read_file(file, held))
    _check_shapes(files, [x for x, _ in arrays])
    return LabeledArrays(
        np.concatenate([x for x, _ in arrays]),
        np.concatenate([y for _, y in arrays]),
        np.repeat([int(file.stem) for file in files], [len(y) for _, y in arrays]),
        folder.name,
    )


def _read_file(file: Path, held: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays x and y of a client."""
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.getinfo("data.npy")
            size = member.file_size
            needed = dataset_bytes(0, 2 * held) | {"the pickle": pickle_bytes(size)}
            check_memory(file, needed)
            with archive.open(member) as opened:
                raw = opened.read(size)
    except FileNotFoundError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        KeyError,
        NotImplementedError,
        OSError,
        OverflowError,
        RuntimeError,
        UnicodeDecodeError,
    ) as error:
        raise damaged_file(
            file, "an array named data, as PFLlib saves it", str(error), "generate it again"
        ) from None
    begin = raw.find(b"\n", 0, _HEADER) + 1  # the header of a .npy file ends with the line
    if not raw.startswith(b"\x93NUMPY") or not begin:
        raise damaged_file(file, "an array of NumPy", "something else", "generate it again")
    found = load_number_arrays(raw[begin:], file)
    x, y = found.get("x"), found.get("y")
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or len(x) != len(y):
        raise damaged_file(
            file, "equally long arrays x and y", ", ".join(found) or "none", "generate it again"
        )
    return x, y


def _check_shapes(files: Sequence[Path], arrays: Sequence[np.ndarray]) -> None:
    for file, x in zip(files, arrays, strict=True):
        if x.shape[1:] != arrays[0].shape[1:] or x.dtype != arrays[0].dtype:
            raise InputError(
                f"{file} has examples of {x.dtype} {x.shape[1:]} and {files[0]} has"
                f" {arrays[0].dtype} {arrays[0].shape[1:]}: give all clients the same"
            )
