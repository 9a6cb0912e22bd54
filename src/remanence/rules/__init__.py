"""What a client does with a gradient: optimisers and their schedules."""

from __future__ import annotations

from collections.abc import Callable

from remanence.rules import schedules
from remanence.rules.adam import adam, adamw
from remanence.rules.buffers import local_buffers
from remanence.rules.schedules import Schedule
from remanence.rules.sgd import sgd
from remanence.types import Optimiser

__all__ = ["OPTIMISERS", "SCHEDULES", "Schedule", "adam", "adamw", "local_buffers", "sgd"]

OPTIMISERS: dict[str, Callable[..., Optimiser]] = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
}

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": schedules.constant,
    "cosine": schedules.cosine,
    "exponential": schedules.exponential,
    "step": schedules.step,
    "warmup": schedules.warmup,
}
