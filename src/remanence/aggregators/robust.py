"""The table of robust aggregators, for replies of which some may be hostile.

They aggregate the model: its parameters, and its buffers by a median. They do not protect the rest
of a payload (label counts, control variates, the teachers of a distillation).
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.aggregators.geometric_median import geometric_median
from remanence.aggregators.krum import krum, multi_krum
from remanence.aggregators.median import median, trimmed_mean
from remanence.aggregators.norm_clip import norm_clip
from remanence.core.slots import Part

__all__ = [
    "ROBUST",
    "geometric_median",
    "krum",
    "median",
    "multi_krum",
    "norm_clip",
    "trimmed_mean",
]

ROBUST: dict[str, Callable[..., Part]] = {
    "geometric_median": geometric_median,
    "krum": krum,
    "median": median,
    "multi_krum": multi_krum,
    "norm_clip": norm_clip,
    "trimmed_mean": trimmed_mean,
}
