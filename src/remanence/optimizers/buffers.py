"""Buffers (batch norm's statistics) that stay with their client instead of being averaged."""

from __future__ import annotations

from remanence.core.slots import Part


def local_buffers() -> Part:
    """Each client starts from the buffers it ended with; the server's are those of the initial
    model and serve newcomers.
    """
    return Part("local_buffers", personal=lambda info: info.buffers)
