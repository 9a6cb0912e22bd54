"""Losses: any of them works with any method, joined by `+`."""

from __future__ import annotations

from collections.abc import Callable

from remanence.objectives.fedlc import fedlc
from remanence.objectives.fedrs import fedrs
from remanence.objectives.masked_ce import masked_ce
from remanence.objectives.tce import tce
from remanence.objectives.wsm import wsm
from remanence.types import Part

__all__ = ["OBJECTIVES", "fedlc", "fedrs", "masked_ce", "tce", "wsm"]

OBJECTIVES: dict[str, Callable[..., Part]] = {
    "fedlc": fedlc,
    "fedrs": fedrs,
    "masked_ce": masked_ce,
    "tce": tce,
    "wsm": wsm,
}
