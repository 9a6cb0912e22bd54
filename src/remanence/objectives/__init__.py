"""Losses: any of them works with any method, joined by `+`."""

from __future__ import annotations

from collections.abc import Callable

from remanence.objectives.tce import tce
from remanence.objectives.wsm import wsm
from remanence.types import Part

__all__ = ["OBJECTIVES", "tce", "wsm"]

OBJECTIVES: dict[str, Callable[..., Part]] = {
    "tce": tce,
    "wsm": wsm,
}
