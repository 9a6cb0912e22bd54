"""Out-of-memory errors, the size of forward passes, and the memory of worker processes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from remanence.core.model import Model
from remanence.training.task import TrainingTask

# A forward pass for evaluation uses at most this part of a GPU's total memory. The free memory may
# differ when a run is resumed, and the last bits depend on the size of a pass.
MEMORY_PART = 1 / 16
LIVE_ACTIVATIONS = 4  # activations as large as the largest that must fit at once
MAX_ROWS = 100_000  # more examples in one pass gain nothing on a GPU
CPU_MAX_ROWS = 10_000  # over all models; see evaluation.CPU_ROWS for one model

# Parameters of mallopt in glibc's <malloc.h>; NEVER is the largest int.
TRIM_THRESHOLD = -1
MMAP_MAX = -4
NEVER = 2**31 - 1


def is_out_of_memory(error: Exception) -> bool:
    """Did the device or, by the message of torch's allocator, the host run out of memory?"""
    return isinstance(
        error, MemoryError | torch.cuda.OutOfMemoryError
    ) or "can't allocate memory" in str(error)


def gpu_memory(device: torch.device) -> int:
    """The bytes of a GPU's memory; 0 on a CPU."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def gpu_memory_text(device: torch.device) -> str:
    """How much of a GPU's memory is free, and how much this run uses; empty on a CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_reserved(device)
    return f" ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free, {used / 1e9:.1f} are this run's)"


def rows_per_forward(task: TrainingTask) -> int:
    """How many examples a forward pass takes, over all models of a stack."""
    if task.info.device.type != "cuda":
        return CPU_MAX_ROWS
    rows = torch.zeros(2, dtype=torch.int64, device=task.info.device)
    total = torch.cuda.get_device_properties(task.info.device).total_memory
    return max_batch(total, max_activation_bytes(task.model, task.train.inputs(rows)))


def max_batch(total: int, activation_bytes: int) -> int:
    """How many examples fit.

    Args:
        total: Bytes of the GPU's memory.
        activation_bytes: Of the largest activation of one example.

    LeNet and ResNet-18 on images of 32x32 pixels and 96 GB; ResNet-18 on 16 GB:

    >>> lenet, resnet = 4 * 6 * 28 * 28, 4 * 64 * 32 * 32
    >>> max_batch(96 * 2**30, lenet), max_batch(96 * 2**30, resnet), max_batch(16 * 2**30, resnet)
    (85598, 6144, 1024)
    """
    budget = int(total * MEMORY_PART)
    return max(1, min(MAX_ROWS, budget // (LIVE_ACTIVATIONS * activation_bytes)))


@torch.no_grad()
def max_activation_bytes(model: Model, x: Tensor) -> int:
    """Bytes of the largest activation of one example, which may be the example itself.

    Args:
        model: The network.
        x: One example or more.
    """
    sizes = [x.nbytes]

    def record_size(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.nbytes)

    hooks = [layer.register_forward_hook(record_size) for layer in model.eval_module.modules()]
    try:
        model.predict(model.initial, x)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes) // len(x)


def disable_malloc_trim() -> None:
    """Keep freed memory in this process from now on.

    glibc maps every large buffer when it is allocated and unmaps it when it is freed, and every
    page then costs a fault; each step of a CNN frees what the next step allocates again. The
    process stays as large as it ever was. That suits workers, which repeat the same work; it is not
    done to a user's own process. Without glibc (macOS, musl) nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_MAX, 0)
