"""What runs promise single examples: by hand, against Opacus' accountant, in the run, its
folder, on resume and in the report.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remanence.config import parse_experiment
from remanence.core.errors import InputError
from remanence.metrics.groups import group_runs
from remanence.privacy import accountant as privacy
from remanence.privacy.accountant import gaussian_epsilon
from remanence.reports.page import render_report
from remanence.reports.privacy import list_guarantees
from remanence.results.columns import NUMBERS
from remanence.results.run import Run
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.privacy_budget import (
    count_passes,
    describe_guarantees,
    epsilon_spent,
    example_guarantee,
    guarantees_of,
    last_round,
    to_metadata,
)
from remanence.testing.toy_task import SMALL, drifting_experiment, small_experiment

needs_accounting = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="the package dp-accounting is not installed (the extra remanence-fl[dp])",
)
needs_opacus = pytest.mark.skipif(
    find_spec("opacus") is None,
    reason="the package opacus is not installed (the extra remanence-fl[dp])",
)
QUICK = {"local.epochs": 1, "clients.sample": 6}


def epsilon_of(method: str, rounds: int, changes: dict[str, Any] | None = None) -> float:
    (promise,) = guarantees_of(small_experiment(method, QUICK | (changes or {})))
    return promise.epsilon(rounds)


# ------------------------------------------------------------------------------------------ by hand


def test_passes_and_counts_add_up_as_squares() -> None:
    """mu = 2 is epsilon 9.99... at delta 1e-5 (test_privacy.py). Its square is 4: 16 passes at
    noise 2, as 16 rounds or as 8 of two epochs; 12 passes and label counts at noise 1; 8 passes,
    counts at noise 1 and 4 forgotten counts at noise 2, one every other round.
    """
    wanted = gaussian_epsilon(2.0, 1e-5)
    assert 9.9 < wanted < 10
    assert epsilon_of("fedavg+dp_sgd(noise=2)", 16) == pytest.approx(wanted)
    assert epsilon_of("fedavg+dp_sgd(noise=2)", 8, {"local.epochs": 2}) == pytest.approx(wanted)
    assert epsilon_of("fedavg+dp_sgd(noise=2)+dp_counts(noise=1)", 12) == pytest.approx(wanted)
    assert epsilon_of(
        "fedwavg(noise=2, every=2)+dp_sgd(noise=2)+dp_counts(noise=1)", 8
    ) == pytest.approx(wanted)


def test_counts_alone_cost_once_for_a_time_step() -> None:
    alone = example_guarantee(small_experiment("flashback+dp_counts(noise=0.5)").task, 100)
    assert alone is not None
    assert alone.epsilon(1) == alone.epsilon(100) == pytest.approx(gaussian_epsilon(2.0, 1e-5))
    assert alone.unit == "label_counts"
    assert "in the label counts alone, the models being open to all" in alone.describe(1)
    twice = guarantees_of(
        drifting_experiment("flashback+dp_counts(noise=0.5)", 2, {"data.public": 8})
    )[0]
    # a time step is a round there
    assert twice.epsilon(2) == pytest.approx(gaussian_epsilon(math.sqrt(8), 1e-5))


def test_steps_count_as_often_as_the_smallest_client_begins_again() -> None:
    """The smallest of the six clients has a single row: seven steps look at it seven times; of
    batches of four of six rows, one in an epoch counts twice.
    """
    assert count_passes(small_experiment("fedavg", {"local.steps": 7}).task) == 7
    assert count_passes(small_experiment("fedavg", {"local.epochs": 3}).task) == 3
    # 6 training rows each: two steps an epoch
    equal = {"data.partition": "dirichlet(alpha=0.5, samples=8)", "local.steps": 3}
    assert count_passes(small_experiment("fedavg", equal).task) == 2


@given(distance=st.floats(0.01, 20), delta=st.floats(1e-9, 0.1))
def test_the_closed_form_is_the_least_epsilon(distance: float, delta: float) -> None:
    found = gaussian_epsilon(distance, delta)
    assert privacy.gaussian_delta(np.array([found]), distance)[0] <= delta * (1 + 1e-9)
    if found > 1e-6:
        assert privacy.gaussian_delta(np.array([found * (1 - 1e-6)]), distance)[0] > delta * (
            1 - 1e-9
        )


@needs_accounting
@needs_opacus
@pytest.mark.filterwarnings("ignore")
def test_opacus_counts_coins_and_we_count_every_look() -> None:
    """Rows drawn by coins of chance .05, noise 1.2, 400 steps: Opacus' Renyi account is a little
    above our tight one, and far below what holds for shuffled rows, which are looked at 20 times.
    """
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.2, 0.05, 400)]
    theirs = float(accountant.get_epsilon(delta=1e-5))
    coins = privacy.epsilon(400, fraction=0.05, noise=1.2, delta=1e-5, sampling="poisson")
    assert 0.85 * theirs < coins <= theirs
    assert gaussian_epsilon(math.sqrt(20) / 1.2, 1e-5) > theirs


# ------------------------------------------------------------------------------ sampling of clients


@needs_accounting
def test_the_real_sampling_is_the_assumed_one() -> None:
    def sampling(changes: dict[str, Any]) -> str:
        return str(guarantees_of(small_experiment("fedavg+dp", changes))[0].sampling)  # type: ignore[attr-defined]

    assert sampling({}) == "fixed"
    assert sampling({"clients.sampling": "poisson"}) == "poisson"
    assert (
        sampling({"clients.sampling": "poisson", "clients.availability": "random(offline=0.2)"})
        == "any"
    )


# ----------------------------------------------------------------------------------------- in a run


def run_small(
    method: str, folder: Path, changes: dict[str, Any] | None = None, said: list[str] | None = None
) -> Run:
    config = parse_experiment(
        {}, SMALL | {"method": method, "rounds": 5, "local.epochs": 1} | (changes or {})
    )
    return start_run(config, folder, progress=Listener(said if said is not None else []))


class Listener:
    """Keeps the logged messages."""

    def __init__(self, said: list[str]):
        self.said = said

    def start(self, title: str, done: int, total: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...
    def note(self, text: str) -> None: ...
    def log(self, text: str) -> None:
        self.said.append(text)


def test_a_budget_ends_a_run_that_is_then_finished(tmp_path: Path) -> None:
    """Noise 2: epsilon 4.4 after 4 rounds (mu = 1), 5.0 after 5."""
    said: list[str] = []
    run = run_small(
        "fedavg+dp_sgd(noise=2, budget=4.5)", tmp_path / "run", {"record.every": 10}, said
    )
    assert [line["round"] for line in run.metrics if line["split"] == "test"] == [1, 2, 3, 4]
    assert run.finished
    assert run.reached_end
    assert run.metadata["last_round"] == 4
    # the last round is evaluated, although it is not the planned one
    assert run.metrics[-1]["accuracy"] is not None
    assert run.metrics[-1]["epsilon_example"] == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert said[0] == "the privacy budget ends the run after round 4 of 5"
    assert "epsilon 4.38 of a budget of 4.5" in said[-1]
    assert said[-1].endswith("the noise of a simulation comes from its seed: not private")


def test_a_resumed_run_says_what_is_spent(tmp_path: Path) -> None:
    run = run_small("fedavg+dp_sgd(noise=2)", tmp_path / "run", {"rounds": 4})
    assert run.finished
    said: list[str] = []
    again = resume_run(run.folder, rounds=5, progress=Listener(said))
    assert said[0].startswith(
        "so far epsilon 4.38 for adding or removing any one example, 10.00 for replacing it, at"
        " delta 1e-05 after 4 rounds"
    )
    spent = [line["epsilon_example"] for line in again.metrics if line["split"] == "test"]
    assert spent == sorted(spent)
    assert len(set(spent)) == 5


def test_without_a_promise_nothing_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    run = run_small("fedavg+dp_sgd(noise=0)", tmp_path / "run", {"rounds": 1}, said)
    assert said == []
    assert not [name for name in run.metrics[0] if name.startswith("epsilon")]
    assert "guarantees" not in run.metadata
    assert list_guarantees(group_runs([run])) == []
    assert 'id="privacy"' not in render_report([run])


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **settings: Any) -> float:
        raise InputError("an epsilon needs the package dp-accounting")

    monkeypatch.setattr(privacy, "_composed", missing)
    promises = guarantees_of(small_experiment("fedavg+dp(noise=1.375)", {"clients.sample": 2}))
    assert describe_guarantees(promises, 7) == [
        "epsilon is not known: an epsilon needs the package dp-accounting"
    ]
    assert epsilon_spent(promises, 7) == {"epsilon": None, "epsilon_replace": None}


@needs_accounting
def test_two_promises_and_the_shorter_counts() -> None:
    both = guarantees_of(
        small_experiment(
            "fedavg+dp(noise=4, budget=50)+dp_sgd(noise=2, budget=4.5)",
            {"clients.sample": 6, "local.epochs": 1},
        )
    )
    assert [promise.unit for promise in both] == ["client", "example"]
    assert last_round(both, 5) == 4
    spent = epsilon_spent(both, 3)
    names = {"epsilon", "epsilon_replace", "epsilon_example", "epsilon_example_replace"}
    assert set(spent) == names <= set(NUMBERS)
    # three passes at noise 2: mu^2 = 3/4, and twice the mu where an example is replaced
    assert spent["epsilon_example"] == gaussian_epsilon(math.sqrt(3) / 2, 1e-5)
    assert spent["epsilon_example_replace"] == gaussian_epsilon(math.sqrt(3), 1e-5)
    written = to_metadata(both, 5)
    assert [promise["neighbors"] for promise in written["guarantees"]] == [
        {"epsilon": "adding or removing one", "epsilon_replace": "replacing one"},
        {"epsilon_example": "adding or removing one", "epsilon_example_replace": "replacing one"},
    ]
    assert written["last_round"] == 4
    assert [promise["budget"] for promise in written["guarantees"]] == [50.0, 4.5]
    assert to_metadata((), 5) == {}


# ------------------------------------------------------------------------------------ in the report


def test_the_report_has_a_section(tmp_path: Path) -> None:
    run = run_small(
        "flashback+dp_sgd(noise=2, budget=4.5)+dp_counts(noise=10)",
        tmp_path / "run",
        {"data.public": 8, "rounds": 2},
    )
    (kept,) = list_guarantees(group_runs([run]))
    assert (kept.unit, kept.budget, kept.delta) == ("any one example", "4.5", "1e-05")
    wanted = gaussian_epsilon(math.sqrt(2 / 4 + 1 / 100), 1e-5)
    assert kept.epsilon == f"{wanted:.2f} after round 2"
    assert kept.replaced == (
        f"{gaussian_epsilon(2 * math.sqrt(2 / 4 + 1 / 100), 1e-5):.2f} after round 2"
    )
    assert kept.basis == (
        "1 pass over its client's examples in every round, noise 2; once in its client's label"
        " counts, noise 10"
    )
    page = render_report([run])
    assert '<h2 id="privacy-heading">Privacy</h2>' in page
    assert kept.epsilon in page
    assert kept.replaced in page
    assert "the noise of a simulation comes from its seed: not private" in page


def test_where_the_cluster_is_stays_out_of_the_page(tmp_path: Path) -> None:
    run = run_small("fedavg", tmp_path / "run", {"rounds": 1, "ray.address": "10.9.8.7:6379"})
    assert run.config.ray.address == "10.9.8.7:6379"
    assert "10.9.8.7" not in render_report([run])
