"""The methods, one file each. This table is the only registry: a new method is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from remanence.algorithms.fedavg import fedavg
from remanence.algorithms.fedprox import fedprox
from remanence.objectives import OBJECTIVES
from remanence.types import Part

__all__ = ["METHODS", "PARTS", "fedavg", "fedprox"]

METHODS: dict[str, Callable[..., Part]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
}

PARTS: dict[str, Callable[..., Part]] = METHODS | OBJECTIVES  # whatever may stand between two `+`
