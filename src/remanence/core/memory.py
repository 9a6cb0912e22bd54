"""The memory that reading a file may take: one limit, and the check that every reader makes before
it reads.

A reader finds in a file's size and headers what it will need, with all copies, and states it by
name. `check_memory` compares the sum with `data.max_bytes`. This module never imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, OverMemoryLimit

VARIABLE = "REMANENCE_MAX_BYTES"
SHARE = 0.75  # of the machine's memory: the default limit
# Of a parsed JSON value for each character that begins or separates one. The largest are lists and
# dictionaries of one value, with their places in what holds them.
JSON_VALUE = 96
# cgroups, version 2 and version 1, as a container sees its own
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MEMINFO = "/proc/meminfo"
# `data.max_bytes` while data are read; None: a reader of other files
_setting: ContextVar[float | None] = ContextVar("data.max_bytes", default=None)


def machine_memory() -> int:
    """The bytes of memory, with swap, that this process may use at most: what the machine or the
    container has, or the process's own limit.
    """
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _installed_memory() if soft == resource.RLIM_INFINITY else min(soft, _installed_memory())


@functools.cache
def _installed_memory() -> int:
    limits = []
    try:
        lines = [line.partition(":") for line in Path(_MEMINFO).read_text().splitlines()]
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in lines}
        limits.append(sizes["MemTotal"] + sizes["SwapTotal"])
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            limits.append(int(Path(path).read_text()))
    return min(limits)


@contextlib.contextmanager
def limit_memory(max_bytes: float) -> Iterator[None]:
    """Read data under the setting `data.max_bytes`; 0: the default."""
    token = _setting.set(max_bytes)
    try:
        yield
    finally:
        _setting.reset(token)


def memory_limit() -> int:
    """The most bytes that reading may take: the setting, the variable REMANENCE_MAX_BYTES, or a
    share of the machine's memory. It is never more than the machine has, whoever wrote the setting.
    """
    wanted = _setting.get() or _variable()
    machine = machine_memory()
    return int(min(wanted, machine)) if wanted else int(SHARE * machine)


def _variable() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(
            f"the variable {VARIABLE} is {text[:40]!r}: write a number of bytes, such as 4e9"
        )
    return value


def check_memory(thing: object, parts: Mapping[str, int], cure: str = "") -> None:
    """Raise `OverMemoryLimit` if reading would take more memory than the limit.

    Args:
        thing: What is read, for the message: the path of a file.
        parts: Bytes at the peak, by what they are for.
        cure: What to do besides raising the limit.
    """
    total, limit = sum(parts.values()), memory_limit()
    if total <= limit:
        return
    largest = max(parts, key=lambda name: parts[name])
    machine, chosen = machine_memory(), _setting.get() or _variable()
    name = "data.max_bytes" if _setting.get() is not None else VARIABLE
    source = f"{name} allows" if chosen else f"the default of {name}, three quarters of memory, is"
    raised = f"raise {name}, such as {name}={_above(total):g}"
    if total > machine:
        source, raised = "this machine allows", "use a machine with more memory"
        limit = machine
    cures = " or ".join([*([cure] if cure else []), raised])
    raise OverMemoryLimit(
        f"reading {thing} takes {size_of(total)} of memory, {size_of(parts[largest])} of it for"
        f" {largest}, and {source} {size_of(limit)}: {cures}"
    )


def _above(count: int) -> float:
    """The number rounded up to two digits."""
    unit = 10.0 ** max(0, len(str(count)) - 2)
    return math.ceil(count / unit) * unit


def json_bytes(text: str | bytes) -> int:
    """The most memory that the values of a JSON text take when they are parsed.

    >>> json_bytes("[[],[],[]]") > 3 * sys.getsizeof([])
    True
    """
    marks: tuple[Any, ...] = (b",", b":", b"[", b"{") if isinstance(text, bytes) else (*",:[{",)
    count = sum(text.count(mark) for mark in marks)
    return sys.getsizeof(text) + JSON_VALUE * (count + 1)


def size_of(count: float) -> str:
    """Return a number of bytes as text.

    >>> size_of(2**31), size_of(12)
    ('2.0 GiB', '12 bytes')
    """
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:.0f} bytes"
