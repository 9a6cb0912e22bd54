"""A round costs nothing for the clients that it does not sample, and neither does its checkpoint."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from remanence.config import parse_experiment
from remanence.core.safe_path import SafePath
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import build
from remanence.results.checkpoint import CheckpointStore
from remanence.rounds.setup import first_state, make_round

FEW, MANY = 1_000, 100_000
SETTINGS: dict[str, Any] = {
    "data.partition": "iid",
    "data.validation": 0,
    "clients.sample": 20,
    "model": "mlp(hidden=4)",
    "rounds": 100,
    "threads": 1,
}


class Cost(NamedTuple):
    """Of one round and its checkpoint."""

    calls: int  # of Python functions
    memory: int  # bytes of Python and NumPy at the peak, beyond those before the round
    disk: int  # bytes of the checkpoint without the clients' states


def cost_of_a_round(folder: Path, method: str, clients: int, changes: dict[str, Any]) -> Cost:
    """The third round, when everything that is made once has been made."""
    samples = 2 * clients + 100
    data = f"synthetic(samples={samples}, classes=3, features=2, test={100 / samples!r})"
    settings = {
        "method": method,
        "data.name": data,
        "clients.count": clients,
        **SETTINGS,
        **changes,
    }
    experiment = build(parse_experiment({}, settings))
    folder.mkdir()
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    round = make_round(experiment, SequentialEngine(experiment.task), folder)
    state, store = first_state(experiment), CheckpointStore(folder / "checkpoints", "run")
    for _ in range(2):
        state, _ = round.run(state)
        store.save(state)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(count)
    try:
        state, _ = round.run(state)
        store.save(state)
    finally:
        sys.setprofile(None)
        memory = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        round.close()
    written = SafePath.of(folder / "checkpoints" / "round-0000003").list_files()
    return Cost(calls, memory, written["state.safetensors"].st_size)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("scaffold", {}),
        ("fedavg", {"clients.availability": "random(offline=0.2)"}),
        (
            "fedavg",
            {"round.over_selection": 1.5, "clients.speed": "lognormal", "round.late": "use"},
        ),
        ("feddyn", {"record.local": True}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_absent_clients_cost_nothing(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    """With 100 times as many clients a single number for each of them would be 100 kB or more, and
    a loop over them 100,000 calls. Both rounds differ in which of their clients are new.
    """
    few, many = (
        cost_of_a_round(tmp_path / str(clients), method, clients, changes)
        for clients in (FEW, MANY)
    )
    assert many.memory < few.memory + 60_000
    assert many.calls < 1.1 * few.calls
    assert many.disk < few.disk + 10_000
