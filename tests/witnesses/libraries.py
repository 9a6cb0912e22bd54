"""Tests that compare with other people's libraries run where these are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed."""
    return pytest.mark.skipif(
        find_spec(package) is None,
        reason=f"the package {package} is not installed: run make test-witnesses",
    )


def load(name: str) -> Any:
    """Import a module of a library that imports torchvision, whether that works here or not: no
    test uses it.
    """
    from torchvision_stand_in import replace_torchvision

    replace_torchvision()
    return importlib.import_module(name)


def check(what: str, difference: float, tolerance: float) -> None:
    """Print a largest difference, which `make test-witnesses` shows, and compare it."""
    print(f"{what}: largest difference {difference:.1e}, at most {tolerance:g}")
    assert difference <= tolerance
