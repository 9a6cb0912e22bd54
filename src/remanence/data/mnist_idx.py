"""MNIST, Fashion-MNIST and EMNIST: images and labels in the IDX format, optionally compressed."""

from __future__ import annotations

import gzip
import io
import math
import string
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from remanence.core.errors import unknown
from remanence.core.expressions import PlainText
from remanence.data.dataset import ArrayDataset, DatasetSplit, validate
from remanence.data.files import damaged_file, find_files, size_of

LIMIT = 2 << 30  # the largest published file, EMNIST by class, unpacks to 0.5 GiB
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
    splits = []
    for images, labels in (names[:2], names[2:]):
        x, y = (
            read_idx(_packed_or_not(folder / images), 3),
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
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return _read_open(path, packed, rank)
        with path.open("rb") as file:
            return _read_open(path, file, rank)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise damaged_file(path, "a complete gzip file", f"a broken one ({error})") from None


def _read_open(path: Path, file: gzip.GzipFile | io.BufferedReader, rank: int) -> np.ndarray:
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
    declared = math.prod(shape)
    if declared > LIMIT:
        raise damaged_file(
            path,
            f"at most {size_of(LIMIT)} of data",
            f"a header that declares {size_of(declared)} {shape}",
        )
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
