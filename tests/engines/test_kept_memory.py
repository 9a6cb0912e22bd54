"""Memory that workers hold on to."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from remanence.engines.memory import keep_memory

FAULTS = """
import resource
from remanence.engines.memory import keep_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        bytearray(b"1") * 2**25  # 32 MB, written to and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = count_faults()
keep_memory()
count_faults()  # the memory comes once
print(plain, count_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_used_again() -> None:
    answer = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    plain, kept = map(int, answer.stdout.split())
    assert plain > 1_000
    assert kept < plain / 20


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_memory()
