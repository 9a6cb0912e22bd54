"""SVHN: digits of house numbers in MATLAB's .mat files (version 5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from remanence.data.files import damaged, locate, size_of
from remanence.data.source import Source, Split, checked
from remanence.errors import InputError

LIMIT = 2 << 30  # bytes of a file, and of the images in it; the largest published one, `extra`, unpacks to 1.5 GiB
SIDE = 32
DIGITS = tuple("0123456789")
MISSING_SCIPY = "source 'svhn' reads .mat files with scipy, which is not installed: pip install scipy"


def svhn(root: Path | None, *, extra: bool = False) -> Source:
    """99,289 colour pictures of digits on house numbers, 32x32 (Netzer, Wang, Coates, Bissacco, Wu, Ng 2011).

    extra: add the 531,131 easier pictures of the third file to the training set.
    """
    names = ["train_32x32.mat", "test_32x32.mat", *(["extra_32x32.mat"] if extra else [])]
    get = f"put {', '.join(names)} from the SVHN page of Stanford in svhn/ (remanence data fetch svhn)"
    folder = locate("svhn", root, [("svhn", names), ("SVHN", names)], get)
    train, test = (read_mat(folder / name) for name in names[:2])
    if extra:
        more = read_mat(folder / names[2])
        train = Split(np.concatenate([train.x, more.x]), np.concatenate([train.y, more.y]))
    note = "Digits of house numbers, colour pictures of 32x32 pixels (Netzer et al. 2011)."
    return checked(Source("svhn", "image", DIGITS, train, test, note=note))


def read_mat(path: Path) -> Split:
    """X [32, 32, 3, n] and y [n, 1] of a .mat file. Names, types and sizes are read and judged first, so that no file decides how much we allocate."""
    try:
        from scipy.io import loadmat, whosmat
    except ImportError:  # comes with scikit-learn, but a user may have removed it
        raise InputError(MISSING_SCIPY) from None
    expected = "the arrays X [32, 32, 3, n] and y [n, 1] of bytes in MATLAB's format 5"
    if path.stat().st_size > LIMIT:
        raise damaged(path, f"at most {size_of(LIMIT)}", size_of(path.stat().st_size))
    try:
        there = {name: (tuple(shape), kind) for name, shape, kind in whosmat(path)}
    except Exception as error:  # scipy raises nearly anything on bytes that are no .mat file
        raise damaged(path, expected, f"what scipy cannot read ({error})") from None
    images, labels = there.get("X"), there.get("y")
    if images is None or labels is None:
        raise damaged(path, expected, f"the names {', '.join(sorted(there)) or 'of nothing'}")
    count = images[0][3] if len(images[0]) == 4 else 0
    if images != ((SIDE, SIDE, 3, count), "uint8") or labels != ((count, 1), "uint8") or count < 1:
        raise damaged(path, expected, f"X {images[0]} of {images[1]} and y {labels[0]} of {labels[1]}")
    if SIDE * SIDE * 3 * count > LIMIT:
        raise damaged(path, f"at most {size_of(LIMIT)} of images", f"a header that declares {count} of them")
    try:
        content = loadmat(path, variable_names=("X", "y"))
    except Exception as error:
        raise damaged(path, expected, f"what scipy cannot read ({error})") from None
    y = content["y"].reshape(-1).astype(np.int64)
    if y.min() < 1 or y.max() > 10:
        raise damaged(path, "labels from 1 to 10, where 10 stands for the digit 0", f"labels from {y.min()} to {y.max()}")
    x = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))  # [n, 3, 32, 32]
    return Split(x, y % 10)
