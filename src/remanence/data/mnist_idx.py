"""MNIST, Fashion-MNIST and EMNIST: images and labels in the IDX format, optionally compressed."""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import string
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from remanence.core.errors import unknown
from remanence.core.expressions import PlainText
from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, DatasetSplit, dataset_bytes, validate
from remanence.data.files import damaged_file, find_files
from remanence.data.npz_reader import DEFLATE_AT_BEST

_CHUNK = 1 << 20

DIGITS = tuple(string.digits)
CHARACTERS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
FASHION = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
# letters whose upper and lower case have the same shape are one class
MERGED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")
EMNIST = {
    "byclass": CHARACTERS,
    "bymerge": MERGED,
    "balanced": MERGED,
    "letters": tuple(string.ascii_lowercase),
    "digits": DIGITS,
    "mnist": DIGITS,
}


def mnist(root: Path | None) -> ArrayDataset:
    """70,000 handwritten digits of 28x28 (LeCun, Cortes, Burges 1998)."""
    note = "70,000 handwritten digits of 28x28 pixels (LeCun, Cortes and Burges 1998)."
    train, test = _read_pair(
        "mnist",
        root,
        ("mnist", "MNIST/raw"),
        "",
        ("train", "t10k"),
        "put the four *-ubyte.gz files of MNIST in mnist/",
    )
    return validate(ArrayDataset("mnist", "image", DIGITS, train, test, note=note))


def fashion_mnist(root: Path | None) -> ArrayDataset:
    """70,000 images of clothes of 28x28 (Xiao, Rasul, Vollgraf 2017)."""
    get = "put the four *-ubyte.gz files of Zalando Research's Fashion-MNIST in fashion-mnist/"
    train, test = _read_pair(
        "fashion_mnist", root, ("fashion-mnist", "FashionMNIST/raw"), "", ("train", "t10k"), get
    )
    return validate(
        ArrayDataset(
            "fashion_mnist",
            "image",
            FASHION,
            train,
            test,
            note="70,000 grey pictures of clothes of 28x28 pixels (Xiao, Rasul and Vollgraf 2017).",
        )
    )


def emnist(root: Path | None, *, split: PlainText = "byclass") -> ArrayDataset:
    """Handwritten characters of 28x28 (Cohen, Afshar, Tapson, van Schaik 2017).

    Args:
        root: the data folder.
        split: the published choice of classes: a key of `EMNIST`.
    """
    if split not in EMNIST:
        raise unknown("split of dataset 'emnist'", split, EMNIST)
    get = "put the *-ubyte.gz files of NIST's gzip.zip (EMNIST) in emnist/"
    train, test = _read_pair(
        "emnist",
        root,
        ("emnist", "emnist/gzip", "EMNIST/raw"),
        f"emnist-{split}-",
        ("train", "test"),
        get,
    )
    # published with rows and columns exchanged
    train, test = (
        DatasetSplit(
            np.ascontiguousarray(part.x.transpose(0, 1, 3, 2)), part.y - (split == "letters")
        )
        for part in (train, test)
    )
    return validate(
        ArrayDataset(
            "emnist",
            "image",
            EMNIST[split],
            train,
            test,
            note=f"Handwritten characters of 28x28 pixels, EMNIST {split} (Cohen et al. 2017).",
        )
    )


def _read_pair(
    dataset: str,
    root: Path | None,
    folders: Sequence[str],
    prefix: str,
    parts: tuple[str, str],
    get: str,
) -> tuple[DatasetSplit, DatasetSplit]:
    names = [
        f"{prefix}{part}-{what}-idx{rank}-ubyte"
        for part in parts
        for what, rank in (("images", 3), ("labels", 1))
    ]
    folder = find_files(dataset, root, [(name, names) for name in folders], get)
    shapes = [
        read_shape(_packed_or_not(folder / name), rank)
        for name, rank in zip(names, (3, 1, 3, 1), strict=True)
    ]
    # EMNIST's images are transposed into a copy
    images = sum(math.prod(shape) for shape in shapes[::2])
    check_memory(folder, dataset_bytes(sum(shape[0] for shape in shapes[1::2]), 2 * images))
    splits = []
    for images_name, labels in (names[:2], names[2:]):
        x, y = (
            read_idx(_packed_or_not(folder / images_name), 3),
            read_idx(_packed_or_not(folder / labels), 1),
        )
        if len(x) != len(y):
            raise damaged_file(
                folder / labels,
                f"{len(x)} labels, as many as there are images",
                f"{len(y)}",
                "fetch both files again",
            )
        splits.append(DatasetSplit(x[:, None], y.astype(np.int64)))
    return splits[0], splits[1]


def _packed_or_not(path: Path) -> Path:
    return path if path.is_file() else path.with_name(path.name + ".gz")


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read a uint8 array with `rank` axes from an IDX file; .gz files are decompressed up to the
    size in the header.
    """
    shape = read_shape(path, rank)
    declared = math.prod(shape)
    check_memory(path, {"the array": declared})
    with _opened(path) as file:
        file.read(4 + 4 * rank)
        # grows with the data: a wrong header cannot make us allocate memory
        content = bytearray()
        while len(content) < declared:
            chunk = file.read(min(_CHUNK, declared - len(content)))
            if not chunk:
                raise damaged_file(
                    path, f"{declared} bytes of data after the header", f"{len(content)}"
                )
            content += chunk
        if file.read(1):
            raise damaged_file(path, f"{declared} bytes of data after the header", "more")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_shape(path: Path, rank: int) -> tuple[int, ...]:
    """Read the shape from the header of an IDX file. The file must be large enough to hold it."""
    with _opened(path) as file:
        header = file.read(4 + 4 * rank)
    magic = bytes((0, 0, 8, rank))  # two zeros, the code of unsigned bytes, the number of axes
    if header[:4] != magic:
        raise damaged_file(
            path,
            f"an IDX file of bytes with {rank} axes, which starts with {magic.hex(' ')}",
            header[:4].hex(" ") or "nothing",
        )
    if len(header) < 4 + 4 * rank:
        raise damaged_file(path, f"a header of {4 + 4 * rank} bytes", f"{len(header)} bytes")
    shape = struct.unpack(f">{rank}I", header[4:])
    declared, size = math.prod(shape), path.stat().st_size
    possible = size * DEFLATE_AT_BEST if path.suffix == ".gz" else size
    if declared > possible or not declared:
        raise damaged_file(path, f"{declared} bytes of data after the header", f"a file of {size}")
    return shape


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise damaged_file(path, "a complete gzip file", f"a broken one ({error})") from None
