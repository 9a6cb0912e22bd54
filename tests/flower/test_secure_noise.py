"""Protective noise differs between runs with the same seed; all other random numbers are equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from in_process import InProcessTransport, make_site, run_in_process, small_config
from run_states import last_state

from remanence.flower.secure_noise import fixed_stats, needs_secret_noise
from remanence.flower.site_storage import SiteStorage
from remanence.testing.toy_task import small_experiment


@pytest.mark.parametrize(
    "method",
    [
        "fedavg+dp(noise=1)",
        "fedavg+dp(noise=1, adaptive=True)",
        "fedavg+dp_sgd(noise=1)",
        "fedavg+wsm+dp_counts(noise=5)",
    ],
)
def test_two_runs_of_the_same_seed_differ(method: str, tmp_path: Path) -> None:
    """All sites know the seed, so noise drawn from it could be subtracted."""
    config = small_config(method, rounds=1)
    models = []
    for name in ("first", "second"):
        sites = {
            number: make_site(tmp_path / name, f"site-{number}", (2 * number, 2 * number + 1))
            for number in range(3)
        }
        models.append(
            last_state(
                run_in_process(config, InProcessTransport(sites), tmp_path / name / "run")
            ).server.model.params
        )
    assert any(bool((value != models[1][name]).any()) for name, value in models[0].items())


def test_noised_label_counts_are_drawn_once(tmp_path: Path) -> None:
    """A repeated request gets the same counts, also after a restart; another run draws new ones."""
    experiment = small_experiment("fedavg+wsm+dp_counts(noise=5)")
    first, again, other = (
        fixed_stats(experiment, SiteStorage(tmp_path, run), [0, 2], 0).label_counts
        for run in ("a-first-run", "a-first-run", "another-run")
    )
    assert (first == again).all()
    assert (first != other).any()
    plain = small_experiment("fedavg+wsm")
    exact = fixed_stats(plain, SiteStorage(tmp_path, "a-plain-run"), [0, 2], 0)
    assert (exact.label_counts == plain.client_stats(np.array([0, 2]), 0).label_counts).all()


def test_only_protective_noise_needs_a_secret_key() -> None:
    assert needs_secret_noise(small_experiment("fedavg+dp_sgd(noise=1)").task)
    assert needs_secret_noise(small_experiment("fedwavg(noise=2)").task)
    assert not needs_secret_noise(small_experiment("fedwavg").task)
    assert not needs_secret_noise(small_experiment("scaffold+wsm").task)
