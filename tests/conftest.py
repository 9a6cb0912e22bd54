"""Shared by all tests: one thread, reproducible examples, and the folder of real data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# a shell starts background processes with SIGINT ignored, and their children inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the number of threads changes the last bits of a sum

# The same examples in every run and no time limit for one: a failure then means a defect, not a busy
# machine.
settings.register_profile(
    "stable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stable")


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Seed torch's generator, so that initial weights do not depend on the tests before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """Return a function: `real_data("mnist")` is the folder of real data if it has a subfolder `mnist`;
    otherwise the test is skipped.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("REMANENCE_DATA")
        if not folder:
            pytest.skip("REMANENCE_DATA does not name a folder of real data")
        if not (Path(folder) / name).is_dir():
            pytest.skip(
                f"the folder of real data that REMANENCE_DATA names has no subfolder {name}"
            )
        return Path(folder)

    return find
