"""A federation equals `sequential`, for every method: coordinator and sites within one process, on
the bytes of every message.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import InProcessTransport, make_site, run_in_process, small_config
from run_states import assert_equals_sequential

from remanence.flower.site import Site
from remanence.methods import METHODS
from remanence.rounds.loop import start_run
from remanence.testing.toy_task import DRIFTING, as_method, fast_config


def method_names() -> Iterator[str]:
    yield from (fast_config(name) for name in METHODS if name != "centralized")
    yield from ("scaffold+wsm", "fedavg+tce", "fedwavg+fedprox(mu=0.1)")
    yield "fedavg+wsm(with_validation=true)"


def three_sites(folder: Path) -> dict[int, Site]:
    return {
        100 + number: make_site(folder, f"site-{number}", range(2 * number, 2 * number + 2))
        for number in range(3)
    }


@pytest.mark.parametrize("method", list(method_names()))
def test_every_method_equals_sequential(method: str, tmp_path: Path) -> None:
    public = {"data.public": 8} if any(p.needs_public_data for p in as_method(method).parts) else {}
    config = small_config(method, **public)
    assert_equals_sequential(
        run_in_process(config, InProcessTransport(three_sites(tmp_path)), tmp_path / "flower"),
        config,
        tmp_path,
        1e-10,
    )


def test_single_precision_equals_sequential(tmp_path: Path) -> None:
    config = small_config("scaffold+wsm", precision="fp32")
    assert_equals_sequential(
        run_in_process(config, InProcessTransport(three_sites(tmp_path)), tmp_path / "flower"),
        config,
        tmp_path,
        1e-5,
    )


def test_drift_on_shares_equals_sequential(tmp_path: Path) -> None:
    """The coordinator names the time step; sites hold the examples of all time steps."""
    config = small_config("fedavg+wsm", **DRIFTING, **{"drift.time_steps": 2})
    assert_equals_sequential(
        run_in_process(config, InProcessTransport(three_sites(tmp_path)), tmp_path / "flower"),
        config,
        tmp_path,
        1e-10,
    )


def test_local_models_are_measured_as_on_sequential(tmp_path: Path) -> None:
    """Local models are scored on the coordinator's test set, and on each other's validation
    examples at the sites that have these.
    """
    config = small_config("fedavg", **{"record.local": True, "rounds": 1})
    run = run_in_process(config, InProcessTransport(three_sites(tmp_path)), tmp_path / "flower")
    reference = start_run(
        config.model_copy(update={"engine": "sequential"}), tmp_path / "reference"
    )
    assert len(run.ledger.records) == len(reference.ledger.records) == 20
    for name in ("moment", "split", "model", "owner", "correct", "total", "predicted"):
        assert (run.ledger.records[name] == reference.ledger.records[name]).all()
