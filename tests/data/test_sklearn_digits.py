from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from remanence.data.sklearn_digits import read_digits


def test_digits_are_those_of_scikit_learn() -> None:
    for ours, theirs in zip(read_digits(), load_digits(return_X_y=True), strict=True):
        assert np.array_equal(ours, theirs)


def test_they_come_from_scikit_learn_itself_where_its_file_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    x, y = read_digits()
    assert (x.shape, y.shape) == ((1797, 64), (1797,))


def test_nobody_waits_for_scikit_learn() -> None:
    """Importing it takes longer than everything else of a short command."""
    script = (
        "import sys; from remanence.data import load_dataset; load_dataset('digits', {}, None);"
        " print('sklearn' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
