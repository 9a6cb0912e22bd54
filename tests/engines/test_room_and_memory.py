"""How much of a network's activations fits into memory, and what workers hold on to."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from remanence.core.model import functionalize
from remanence.engines.memory import MAX_ROWS, disable_malloc_trim, max_activation_bytes, max_batch

FAULTS = """
import resource
from remanence.engines.memory import disable_malloc_trim

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        bytearray(b"1") * 2**25  # 32 MB, written to and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = count_faults()
disable_malloc_trim()
count_faults()  # the memory comes once
print(plain, count_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_used_again() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    plain, kept = map(int, answer.stdout.split())
    assert plain > 1_000
    assert kept < plain / 20


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    disable_malloc_trim()


def test_the_widest_activation_of_a_row() -> None:
    """A row of 1x4x4 doubles has 128 bytes, five channels of it 640; two rows at once change
    nothing.
    """
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    model = functionalize(
        nn.Sequential(nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2)),
        x,
        2,
        dtype=torch.float64,
    )
    assert max_activation_bytes(model, x) == max_activation_bytes(model, x[:1]) == 640
    assert not any(layer._forward_hooks for layer in model.eval_module.modules())
    narrow = functionalize(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), x, 2, dtype=torch.float64)
    assert max_activation_bytes(narrow, x) == 128  # the row itself


def test_rows_have_a_lowest_and_a_highest_number() -> None:
    assert max_batch(10**6, 10**9) == 1
    assert max_batch(10**12, 100) == MAX_ROWS
