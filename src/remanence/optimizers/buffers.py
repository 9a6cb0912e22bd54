"""Buffers (batch norm's statistics) that stay with their client instead of being averaged."""

from __future__ import annotations

from remanence.core.slots import Part


def local_buffers() -> Part:
    """Each client starts from its own buffers of its last round. The server keeps those of the
    initial model, from which new clients start.
    """
    return Part("local_buffers", personal=lambda info: info.buffers)
