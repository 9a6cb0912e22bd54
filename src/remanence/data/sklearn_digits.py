"""`digits`: the handwritten digits that scikit-learn includes, so nothing needs to be fetched."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from remanence.data.dataset import (
    ArrayDataset,
    DatasetSplit,
    check_fraction,
    hold_out_test,
    validate,
)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's file of digits without importing scikit-learn, which takes seconds;
    import it if the file is not at its usual place.
    """
    package = importlib.util.find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="ascii") as file:
                table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x, y


def digits(root: Path | None, *, test: float = 0.2) -> ArrayDataset:
    """1,797 handwritten digits of 8x8 with 17 gray levels (Alpaydin and Kaynak 1998).

    Args:
        root: not used.
        test: the fraction of test examples.
    """
    check_fraction(test)
    x, y = read_digits()
    split = DatasetSplit(
        np.rint(x).astype(np.uint8).reshape(-1, 1, 8, 8), np.asarray(y, dtype=np.int64)
    )
    note = (
        "1,797 handwritten digits of 8x8 pixels with values 0 to 16 (Alpaydin and Kaynak"
        " 1998), from scikit-learn."
    )
    return validate(
        ArrayDataset("digits", "image", tuple("0123456789"), *hold_out_test(split, test), note=note)
    )
