"""Imports scripts of the folder `benchmarks`, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> Any:
    """The module `benchmarks/NAME.py`. It is registered under another name, so that it does not
    hide a package of the tests.
    """
    module_name = f"benchmark_{name}"
    spec = importlib.util.spec_from_file_location(module_name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
