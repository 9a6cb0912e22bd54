"""Losses, one file each: any of them works with any method, joined by `+`.

    wsm, tce, fedrs, fedlc, masked_ce    losses for clients that lack classes
    softmax                              what these losses share
    dynamic_distillation                 the distillation loss of Flashback

This package imports core alone.
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.core.slots import Part
from remanence.losses.fedlc import fedlc
from remanence.losses.fedrs import fedrs
from remanence.losses.masked_ce import masked_ce
from remanence.losses.tce import tce
from remanence.losses.wsm import wsm

__all__ = ["LOSSES", "fedlc", "fedrs", "masked_ce", "tce", "wsm"]

LOSSES: dict[str, Callable[..., Part]] = {
    "fedlc": fedlc,
    "fedrs": fedrs,
    "masked_ce": masked_ce,
    "tce": tce,
    "wsm": wsm,
}


def __dir__() -> list[str]:
    """The names of an experiment alone, for completion."""
    return sorted(__all__)
