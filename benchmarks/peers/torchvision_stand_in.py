"""An empty torchvision, for peers that import it whether they need it or not.

Its builds are tied to one build of torch each, and there is none for every CPU build: where it
cannot be imported, names that no job of ours uses take its place.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = ("datasets", "datasets.utils", "models", "transforms")


class Hollow(ModuleType):
    """A module in which every name is an empty class, which takes any arguments."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # others ask whether torchvision can be found

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **options: None})


def replace_torchvision() -> None:
    """Only where the real one does not work."""
    try:
        import torchvision  # noqa: F401
    except Exception:  # a build for another torch fails in many ways
        for name in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = Hollow("torchvision")
        for name in MODULES:
            sys.modules[f"torchvision.{name}"] = Hollow(f"torchvision.{name}")
        for name in ("datasets", "models", "transforms"):
            setattr(sys.modules["torchvision"], name, sys.modules[f"torchvision.{name}"])
