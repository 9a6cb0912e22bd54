"""Loading the data of an experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remanence.config import parse_experiment
from remanence.experiment.data_setup import load_data


@pytest.mark.parametrize("name", ["{}", "npz(path='{}')"])
def test_a_file_that_has_changed_is_read_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    config = parse_experiment({}, {"data.name": name.format(path)})
    sizes, loaded = [], []
    for count in (20, 40):
        np.savez(path, x=np.eye(count, 4, dtype=np.float32), y=np.arange(count) % 2)
        loaded = [load_data(config) for _ in range(2)]
        sizes.append(len(loaded[0].train) + len(loaded[0].test))
    assert sizes == [20, 40]
    assert loaded[0] is loaded[1]  # one copy for all runs of a comparison
