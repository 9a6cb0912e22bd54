"""Cases that fail in every way, for the test of the suite."""

from __future__ import annotations

import os
import time

from gpu.cases import Case


def wrong(device: str) -> float:
    raise AssertionError("it differs from the reference\nand more")


def dies(device: str) -> float:
    os.write(2, b"a fault of the driver\n")
    os._exit(7)


def hangs(device: str) -> float:
    time.sleep(600)
    return 0.0


def prints(device: str) -> float:
    print("this is no answer")
    return 1.5e-11


def all_cases() -> list[Case]:
    return [
        Case("wrong", wrong),
        Case("dies", dies),
        Case("hangs", hangs),
        Case("needs a GPU", wrong, needs_gpu="it is about a GPU"),
        Case("prints", prints),
        Case("in another precision", lambda device: 0.1, dtype="bfloat16"),
    ]
