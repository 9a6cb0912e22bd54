"""A federation equals `sequential`, for every method: the coordinator's and the sites' code within
one process, on the bytes that would travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from indoors import Indoors, make_site, play_indoors, small_spec
from states import assert_equals_loop

from remanence.flower.site import Site
from remanence.methods import METHODS
from remanence.rounds.loop import start_run
from remanence.testing.toy_task import DRIFTING, as_method, fast_config


def names_of_methods() -> Iterator[str]:
    yield from (fast_config(name) for name in METHODS if name != "centralized")
    yield from ("scaffold+wsm", "fedavg+tce", "fedwavg+fedprox(mu=0.1)")


def three_sites(folder: Path) -> dict[int, Site]:
    return {
        100 + number: make_site(folder, f"site-{number}", range(2 * number, 2 * number + 2))
        for number in range(3)
    }


@pytest.mark.parametrize("method", list(names_of_methods()))
def test_every_method_equals_loop(method: str, tmp_path: Path) -> None:
    public = {"data.public": 8} if any(p.needs_public_data for p in as_method(method).parts) else {}
    spec = small_spec(method, **public)
    assert_equals_loop(
        play_indoors(spec, Indoors(three_sites(tmp_path)), tmp_path / "flower"),
        spec,
        tmp_path,
        1e-10,
    )


def test_single_precision_equals_loop(tmp_path: Path) -> None:
    spec = small_spec("scaffold+wsm", precision="fp32")
    assert_equals_loop(
        play_indoors(spec, Indoors(three_sites(tmp_path)), tmp_path / "flower"),
        spec,
        tmp_path,
        1e-5,
    )


def test_drift_on_shares_equals_loop(tmp_path: Path) -> None:
    """The coordinator names the time step, and sites hold the rows of all of them."""
    spec = small_spec("fedavg+wsm", **DRIFTING, **{"drift.time_steps": 2})
    assert_equals_loop(
        play_indoors(spec, Indoors(three_sites(tmp_path)), tmp_path / "flower"),
        spec,
        tmp_path,
        1e-10,
    )


def test_local_models_are_measured_as_on_loop(tmp_path: Path) -> None:
    """Local models on the test set at the coordinator, and on each other's validation rows,
    which takes them to the sites that have these rows.
    """
    spec = small_spec("fedavg", **{"record.local": True, "rounds": 1})
    run = play_indoors(spec, Indoors(three_sites(tmp_path)), tmp_path / "flower")
    oracle = start_run(spec.model_copy(update={"engine": "sequential"}), tmp_path / "oracle")
    assert len(run.ledger.records) == len(oracle.ledger.records) == 20
    for name in ("moment", "split", "model", "owner", "correct", "total", "predicted"):
        assert (run.ledger.records[name] == oracle.ledger.records[name]).all()
