"""Device, precision and determinism of an experiment."""

from __future__ import annotations

import os

import torch

from remanence.config import Experiment
from remanence.core.errors import InputError


def set_up_torch(config: Experiment) -> tuple[torch.device, torch.dtype]:
    """Set torch's threads and precision for the process.

    Returns:
        The device and the floating-point type of the experiment.
    """
    device = select_device(config.device)
    if config.precision == "tf32" and device.type != "cuda":
        raise InputError("precision tf32 exists on CUDA devices only: use fp32")
    if config.precision == "bf16" and device.type != "cuda":
        raise InputError("precision bf16 is for CUDA devices: use fp32 on the CPU")
    if config.threads:
        torch.set_num_threads(config.threads)
    set_precision(config)
    return device, torch.float64 if config.precision == "fp64" else torch.float32


def select_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: use cpu, cuda, cuda:0 or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise InputError(
            f"device {name!r} was requested, but torch finds no such CUDA device: use"
            " --device cpu, or install a CUDA build of torch"
        )
    return device


def set_precision(config: Experiment) -> None:
    """Set tf32 and determinism, which torch keeps for the whole process: to be called again before
    an experiment runs if another one was built after it.
    """
    tf32 = config.precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # cuBLAS reads it once in a process, so that a deterministic run may follow another run
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.deterministic:
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(config.deterministic)
