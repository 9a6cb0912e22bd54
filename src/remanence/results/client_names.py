"""The names of clients that are sites of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remanence.results.run import Run


def client_names(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The sites that are the clients of a run, by number; empty where clients have no names."""
    names = metadata.get("client_names", [])
    return tuple(map(str, names)) if isinstance(names, list) else ()


def client_label(run: Run, client: int) -> str:
    """The name of a client's site, or `client 3`."""
    names = client_names(run.metadata)
    return names[client] if 0 <= client < len(names) else f"client {client}"
