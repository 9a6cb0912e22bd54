"""Peak memory, and the machine and versions that a result was measured with."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from remanence.experiment.build import BuiltExperiment


@contextlib.contextmanager
def watching_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak memory of a block: of the GPU, or of this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # only Linux can reset the peak; elsewhere it is that of the whole process
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    yield (
        lambda: (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_of_process()
        )
    )


def peak_of_process() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def about_machine(experiment: BuiltExperiment, threads: int) -> dict[str, Any]:
    """The machine and the versions that a result was measured with."""
    device = experiment.task.info.device
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else processor_name(),
        "cores": os.cpu_count(),
        "precision": experiment.config.precision,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def processor_name() -> str:
    """The processor's model, where the system says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
