"""Remanence: federated and decentralized learning on data that differ and drift. It measures what
the models forget (classes, clients, examples; in which phase) and has methods that prevent it.

    import remanence as rem
    run = rem.run(method="fedavg+wsm", data="digits", rounds=20, out="my-run")
    run.accuracy, run.per_class  # on the test set
    run.plot()                   # accuracy over rounds
    run.model()                  # the trained nn.Module

Names are imported when they are first used, so that `import remanence` and `remanence --help` do
not import torch. Where to start reading: `api` and `analysis` for the Python API, `config` for the
settings, `methods` for the methods, `rounds.loop` for what a run does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from remanence.version import __version__

if TYPE_CHECKING:
    from remanence import losses, methods
    from remanence.analysis.actions import diagnose, evaluate, export, report
    from remanence.analysis.results import BestMethod, ComparisonResult, RunResult, load
    from remanence.api import compare, resume, run, search
    from remanence.config import Experiment
    from remanence.core.errors import InputError, LearnedNothing, RemanenceError
    from remanence.core.slots import Method, Part
    from remanence.data import from_dataset
    from remanence.sweeps.search_result import SearchResult

_MODULES = {
    "run": "remanence.api",
    "compare": "remanence.api",
    "resume": "remanence.api",
    "search": "remanence.api",
    "load": "remanence.analysis.results",
    "diagnose": "remanence.analysis.actions",
    "evaluate": "remanence.analysis.actions",
    "export": "remanence.analysis.actions",
    "report": "remanence.analysis.actions",
    "Experiment": "remanence.config",
    "RunResult": "remanence.analysis.results",
    "ComparisonResult": "remanence.analysis.results",
    "SearchResult": "remanence.sweeps.search_result",
    "BestMethod": "remanence.analysis.results",
    "from_dataset": "remanence.data",
    "InputError": "remanence.core.errors",
    "LearnedNothing": "remanence.core.errors",
    "RemanenceError": "remanence.core.errors",
    "Method": "remanence.core.slots",
    "Part": "remanence.core.slots",
}
_NAMESPACES = ("losses", "methods")  # packages whose names are those of an experiment

__all__ = [
    "BestMethod",
    "ComparisonResult",
    "Experiment",
    "InputError",
    "LearnedNothing",
    "Method",
    "Part",
    "RemanenceError",
    "RunResult",
    "SearchResult",
    "__version__",
    "compare",
    "diagnose",
    "evaluate",
    "export",
    "from_dataset",
    "load",
    "losses",
    "methods",
    "report",
    "resume",
    "run",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"remanence.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'remanence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
