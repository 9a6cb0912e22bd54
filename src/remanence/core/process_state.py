"""Restores the settings of the process that a run changes: torch's threads, precision and
determinism, environment variables, `sys.path` and signal handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class ProcessState:
    """The settings of the process at one moment."""

    threads: int
    matmul_precision: str | None
    cudnn_tf32: bool | None
    fp32_precisions: tuple[str, ...]  # of FP32_BACKENDS
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    deterministic: bool
    deterministic_warn_only: bool
    environment: dict[str, str]
    path: list[str]
    signal_handlers: dict[signal.Signals, Any]

    @classmethod
    def capture(cls) -> ProcessState:
        return cls(
            threads=torch.get_num_threads(),
            matmul_precision=_read(torch.get_float32_matmul_precision),
            cudnn_tf32=_read(lambda: torch.backends.cudnn.allow_tf32),
            fp32_precisions=tuple(backend.fp32_precision for backend in _fp32_backends()),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            environment=dict(os.environ),
            path=list(sys.path),
            signal_handlers={number: signal.getsignal(number) for number in SIGNALS},
        )

    def restore(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.cudnn_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        # after the older settings above, which change these
        for backend, precision in zip(_fp32_backends(), self.fp32_precisions, strict=True):
            backend.fp32_precision = precision
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.use_deterministic_algorithms(
            self.deterministic, warn_only=self.deterministic_warn_only
        )
        if dict(os.environ) != self.environment:
            for name in set(os.environ) - set(self.environment):
                del os.environ[name]
            os.environ.update(self.environment)
        sys.path[:] = self.path
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.signal_handlers.items():
                # None: a handler that was not installed from Python, which Python cannot restore
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _fp32_backends() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    )


def _read(setting: Callable[[], Any]) -> Any:
    """A setting of torch, or None where torch raises an error because it was set through both its
    older and its newer interface.
    """
    try:
        return setting()
    except RuntimeError:
        return None


@dataclass
class _Nesting:
    lock: threading.Lock
    depth: int = 0
    state: ProcessState | None = None


_nesting = _Nesting(threading.Lock())


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the settings of the process at the end, also after an error or Ctrl-C.

    Contexts may be nested and entered by several threads at a time: the first one to enter
    captures the settings, the last one to leave restores them.
    """
    with _nesting.lock:
        if _nesting.depth == 0:
            _nesting.state = ProcessState.capture()
        _nesting.depth += 1
    try:
        yield
    finally:
        with _nesting.lock:
            _nesting.depth -= 1
            if _nesting.depth == 0 and _nesting.state is not None:
                _nesting.state.restore()
                _nesting.state = None
