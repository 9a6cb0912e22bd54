"""Remanence: federated and decentralized learning on data that differ and drift. It measures what
the models forget (classes, clients, examples; in which phase) and has methods that prevent it.

    import remanence as rem
    run = rem.run(method="fedavg+wsm", data="digits", rounds=20, out="my-run")
    rounds, accuracy = run.curve()  # on the test set
    run.model()                     # the trained nn.Module

Names are imported when they are first used, so that `import remanence` and `remanence --help` do
not import torch. Where to start reading: `api` for the Python API, `config` for the settings,
`methods` for the methods, `rounds.loop` for what a run does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remanence.version import __version__

if TYPE_CHECKING:
    from remanence.api import compare, resume, run, search
    from remanence.core.errors import InputError, LearnedNothing, RemanenceError
    from remanence.core.slots import Method, Part
    from remanence.data import from_dataset
    from remanence.diagnosis import diagnose
    from remanence.reports import write_report
    from remanence.results.run import Comparison, Run, load
    from remanence.sweeps.search_result import SearchResult

_MODULES = {
    "run": "remanence.api",
    "compare": "remanence.api",
    "resume": "remanence.api",
    "search": "remanence.api",
    "load": "remanence.results.run",
    "Run": "remanence.results.run",
    "Comparison": "remanence.results.run",
    "SearchResult": "remanence.sweeps.search_result",
    "diagnose": "remanence.diagnosis",
    "from_dataset": "remanence.data",
    "write_report": "remanence.reports",
    "InputError": "remanence.core.errors",
    "LearnedNothing": "remanence.core.errors",
    "RemanenceError": "remanence.core.errors",
    "Method": "remanence.core.slots",
    "Part": "remanence.core.slots",
}

__all__ = [
    "Comparison",
    "InputError",
    "LearnedNothing",
    "Method",
    "Part",
    "RemanenceError",
    "Run",
    "SearchResult",
    "__version__",
    "compare",
    "diagnose",
    "from_dataset",
    "load",
    "resume",
    "run",
    "search",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'remanence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
