"""Every column that a run writes to metrics.jsonl is listed, and numbers are numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remanence as rem
from remanence.results.columns import COLUMNS, NUMBERS, OTHERS


@pytest.mark.parametrize(
    "flags",
    [
        {"method": "fedavg", "set": {"round.deadline": "quantile(share=0.8)", "round.late": "use"}},
        {
            "method": "feddrift",
            "set": {"drift.schedule": "staggered(clusters=2)", "drift.time_steps": 2},
        },
        {"method": "random", "set": {}},
    ],
    ids=["late replies", "several models", "without a server"],
)
def test_all_columns_are_listed(tmp_path: Path, flags: dict[str, Any]) -> None:
    run = rem.run(
        data="synthetic(samples=400, classes=4, features=4)",
        clients=10,
        rounds=2,
        engine="sequential",
        model="mlp(hidden=4)",
        quiet=True,
        out=tmp_path / "run",
        **flags,
    )
    assert run.metrics
    for line in run.metrics:
        assert set(line) <= set(COLUMNS)
        for name in set(line) & set(NUMBERS):
            assert line[name] is None or isinstance(line[name], int | float)
    assert not set(NUMBERS) & set(OTHERS)
