"""Memory that a worker process holds on to: given back to the system after every step, it would have to be asked for, and filled with zeros, in the next."""

from __future__ import annotations

import contextlib
import ctypes

# The parameters of mallopt in glibc's <malloc.h>, and how much free memory at the heap's end is too much: never, up to the largest int
TRIM_THRESHOLD = -1
MMAP_MAX = -4
NEVER = 2**31 - 1


def keep_memory() -> None:
    """From now on freed memory stays with this process, for what it asks for next.

    glibc maps every buffer of some megabytes anew and unmaps it when it is freed; each of its pages then costs a fault. A step of a CNN frees what it computed
    and the next step asks for the same again. The process stays as large as it ever was: right for workers, which do the same over and over, and not done to a
    user's own process. Where there is another library than glibc (macOS, musl), nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_MAX, 0)
