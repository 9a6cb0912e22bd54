"""What a client does with a gradient: optimisers and their schedules."""

from __future__ import annotations

from collections.abc import Callable

from remanence.core.types import Optimiser
from remanence.optimizers import schedules
from remanence.optimizers.adam import adam, adamw
from remanence.optimizers.buffers import local_buffers
from remanence.optimizers.schedules import Schedule
from remanence.optimizers.sgd import sgd

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
