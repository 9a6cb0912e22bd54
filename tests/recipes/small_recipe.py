"""A small recipe for tests: rows a, b and c, columns x and y."""

from __future__ import annotations

from typing import Any

TABLE: dict[str, Any] = {
    "title": "t",
    "paper": "p",
    "source": "s",
    "measure": "last",
    "experiment": {"rounds": 5},
    "rows": [{"label": name} for name in "abc"],
    "columns": [{"label": "x"}, {"label": "y"}],
    "published": {"a": [0.4, "-"], "b": [[0.6, 0.02], "NC"], "c": ["-", "-"]},
    "claims": [],
    "scales": {},
}
