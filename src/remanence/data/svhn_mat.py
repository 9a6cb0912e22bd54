"""SVHN: digits of house numbers in MATLAB files (version 5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from remanence.core.memory import check_memory
from remanence.data.dataset import ArrayDataset, DatasetSplit, dataset_bytes, validate
from remanence.data.files import damaged_file, find_files
from remanence.data.mat_reader import UnsupportedFile, read_arrays

SIDE = 32
DIGITS = tuple("0123456789")


def svhn(root: Path | None, *, extra: bool = False) -> ArrayDataset:
    """99,289 color images of digits on house numbers, 32x32 (Netzer, Wang, Coates, Bissacco, Wu,
    Ng 2011).

    Args:
        root: the data folder.
        extra: add the 531,131 easier images of the third file to the training set.
    """
    names = ["train_32x32.mat", "test_32x32.mat", *(["extra_32x32.mat"] if extra else [])]
    get = (
        f"put {', '.join(names)} from the SVHN page of Stanford in svhn/ (remanence data fetch"
        " svhn)"
    )
    folder = find_files("svhn", root, [("svhn", names), ("SVHN", names)], get)
    train = read_mat(folder / names[0])
    test = read_mat(folder / names[1], train.x.nbytes)
    if extra:
        # joined, the training images are in memory twice
        more = read_mat(folder / names[2], 2 * train.x.nbytes + test.x.nbytes, copies=2)
        train = DatasetSplit(np.concatenate([train.x, more.x]), np.concatenate([train.y, more.y]))
    note = "Digits of house numbers, color pictures of 32x32 pixels (Netzer et al. 2011)."
    return validate(ArrayDataset("svhn", "image", DIGITS, train, test, note=note))


def read_mat(path: Path, held: int = 0, copies: int = 1) -> DatasetSplit:
    """Read X [32, 32, 3, n] and y [n, 1] from a .mat file.

    Args:
        path: The file.
        held: bytes of the images of other files.
        copies: how often the images of this file will be in memory.
    """
    expected = "the arrays X [32, 32, 3, n] and y [n, 1] of bytes in MATLAB's format 5"
    size = path.stat().st_size

    def check(unpacked: int) -> None:
        # the images are transposed into a copy
        images = max(size, unpacked)
        examples = dataset_bytes(images // (3 * SIDE * SIDE), held + copies * images)
        check_memory(path, {"the file": size, "the arrays": unpacked, **examples})

    check(0)
    try:
        arrays = read_arrays(path.read_bytes(), ("X", "y"), check)
    except UnsupportedFile as found:
        raise damaged_file(path, expected, str(found)) from None
    if arrays.keys() != {"X", "y"}:
        raise damaged_file(
            path, expected, f"the arrays {', '.join(sorted(arrays)) or 'of other names or none'}"
        )
    images, labels = arrays["X"], arrays["y"]
    count = images.shape[-1]
    if images.shape != (SIDE, SIDE, 3, count) or labels.shape != (count, 1) or count < 1:
        raise damaged_file(path, expected, f"X {images.shape} and y {labels.shape}")
    y = labels.reshape(-1).astype(np.int64)
    if y.min() < 1 or y.max() > 10:
        raise damaged_file(
            path,
            "labels from 1 to 10, where 10 stands for the digit 0",
            f"labels from {y.min()} to {y.max()}",
        )
    x = np.ascontiguousarray(images.transpose(3, 2, 0, 1))  # [n, 3, 32, 32]
    return DatasetSplit(x, y % 10)
