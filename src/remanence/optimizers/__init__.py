"""Local optimizers and learning rate schedules.

    sgd, adam    as torch.optim has them, as pure functions
    schedules    factors of the learning rate over rounds
    buffers      `local_buffers`: batch norm statistics that stay with their client

This package imports core alone.
"""

from __future__ import annotations

from collections.abc import Callable

from remanence.core.slots import Optimizer
from remanence.optimizers import schedules
from remanence.optimizers.adam import adam, adamw
from remanence.optimizers.buffers import local_buffers
from remanence.optimizers.schedules import LrSchedule
from remanence.optimizers.sgd import sgd

__all__ = ["LR_SCHEDULES", "OPTIMIZERS", "LrSchedule", "adam", "adamw", "local_buffers", "sgd"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": adam,
    "adamw": adamw,
    "sgd": sgd,
}

LR_SCHEDULES: dict[str, Callable[..., LrSchedule]] = {
    "constant": schedules.constant,
    "cosine": schedules.cosine,
    "exponential": schedules.exponential,
    "step": schedules.step,
    "warmup": schedules.warmup,
}
