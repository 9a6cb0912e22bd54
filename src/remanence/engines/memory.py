"""Memory: whether it sufficed, how many rows of activations fit into it, and what a worker
process holds on to.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from remanence.core.model import Model
from remanence.training.task import TrainingTask

# looking at rows takes at most one part of so many of a GPU's memory (of all of it: what is free
# differs from start to resume, and bits with it),
SHARE = 16
ALIVE = 4  # in which so many activations as large as the largest have to fit at once;
MOST_ROWS = 100_000  # but it does not gain by more rows than these,
ROWS = 10_000  # and on a CPU models take turns and the cache decides: see common.CACHED_ROWS

# The parameters of mallopt in glibc's <malloc.h>, and how much free memory at the heap's end is too
# much: never, up to the largest int
TRIM_THRESHOLD = -1
MMAP_MAX = -4
NEVER = 2**31 - 1


def is_out_of_memory(error: Exception) -> bool:
    """Of the device or, in the words of torch's allocator, of the host."""
    return isinstance(
        error, MemoryError | torch.cuda.OutOfMemoryError
    ) or "can't allocate memory" in str(error)


def gpu_memory_text(device: torch.device) -> str:
    """How much of a GPU's memory is free, and how much of the rest is ours: the others' may be
    why it does not suffice.
    """
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    return f" ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free, {ours / 1e9:.1f} are this run's)"


def rows_per_forward(task: TrainingTask) -> int:
    """How many rows the models of a stack look at together."""
    if task.info.device.type != "cuda":
        return ROWS
    rows = torch.zeros(2, dtype=torch.int64, device=task.info.device)
    total = torch.cuda.get_device_properties(task.info.device).total_memory
    return max_batch(total, max_activation_bytes(task.model, task.train.inputs(rows)))


def max_batch(total: int, widest: int) -> int:
    """Rows of whose activations the widest takes so many bytes. 96 GB, LeNet and ResNet-18 on 32x32
    pixels, then 16 GB:

    >>> max_batch(96 * 2**30, 4 * 6 * 28 * 28), max_batch(96 * 2**30, 4 * 64 * 32 * 32), max_batch(16 * 2**30, 4 * 64 * 32 * 32)
    (85598, 6144, 1024)
    """
    return max(1, min(MOST_ROWS, total // SHARE // (ALIVE * widest)))


@torch.no_grad()
def max_activation_bytes(model: Model, x: Tensor) -> int:
    """Bytes of the largest of what a network's layers make of one row, the row itself included.
    x: one row or more
    """
    sizes = [x.nbytes]

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    hooks = [layer.register_forward_hook(note) for layer in model.eval_module.modules()]
    try:
        model.predict(model.initial, x)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes) // len(x)


def disable_malloc_trim() -> None:
    """From now on freed memory stays with this process, for what it asks for next.

    glibc maps every buffer of some megabytes anew and unmaps it when it is freed; each of its pages
    then costs a fault. A step of a CNN frees what it computed and the next step asks for the same
    again. The process stays as large as it ever was: right for workers, which do the same over and
    over, and not done to a user's own process. Where there is another library than glibc (macOS,
    musl), nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_MAX, 0)
