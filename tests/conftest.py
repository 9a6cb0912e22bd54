"""What every test shares: one thread, stable examples, and the way to real data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell starts what it runs in the background deaf to Ctrl-C, and children inherit it
torch.set_num_threads(1)  # the number of threads changes the last bits of a sum

# The same examples every time, and no limit on the time of one: a red test then means a defect, not
# a busy machine.
settings.register_profile(
    "stable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stable")


@pytest.fixture(autouse=True)
def same_luck() -> None:
    """What a test draws from torch's own generator, such as a network's first weights, does not
    depend on the tests before it.
    """
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """`real_data("mnist")` is the folder of real data, which then holds a sub-folder `mnist`;
    without that the test is skipped.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("REMANENCE_DATA")
        if not folder:
            pytest.skip("REMANENCE_DATA does not name a folder of real data")
        if not (Path(folder) / name).is_dir():
            pytest.skip(
                f"the folder of real data that REMANENCE_DATA names has no sub-folder {name}"
            )
        return Path(folder)

    return find
