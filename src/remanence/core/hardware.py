"""The name of the machine, for metadata."""

from __future__ import annotations

import os
import platform

import torch


def describe_machine(device: str) -> str:
    """The accelerator's name, or the number of cores."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} cores ({platform.machine()})"
