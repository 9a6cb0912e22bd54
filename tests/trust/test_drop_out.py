"""Clients that drop out: every round ends with the clients that reply, and sampling more of them
compensates.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trust.faults import record_trial

from remanence.config import parse_experiment
from remanence.engines.table import make_engine
from remanence.experiment.build import build
from remanence.testing.toy_task import run_rounds, small_experiment

MANY = {
    "data.name": "synthetic(samples=400, classes=4, features=5, test=0.25)",
    "data.partition": "iid",
    "clients.count": 20,
    "clients.sample": 20,
}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "random(peers=2)", "feddrift"])
@pytest.mark.parametrize("share", [10, 30, 50])
def test_rounds_end_with_the_clients_that_reply(share: int, method: str) -> None:
    experiment = small_experiment(
        method, MANY | {"clients.availability": f"random(offline={share / 100})"}
    )
    state, lines = run_rounds(experiment, make_engine("vectorized", experiment.task), 8)
    there = [line["replies"] for line in lines]
    assert all(count > 0 for count in there)
    assert not any(line["abandoned"] or line["rejected"] for line in lines)
    # of 160 draws: over three standard deviations
    assert abs(np.mean(there) / 20 - (1 - share / 100)) < 0.15
    models = (
        [state.client_models.models]
        if state.client_models is not None
        else [server.model for server in state.global_models]
    )
    assert all(
        bool(torch.isfinite(value).all()) for model in models for value in model.params.values()
    )
    record_trial(
        f"{share}% of the clients drop out", "no round failed", len(lines), engine="vectorized"
    )


def test_a_round_without_clients_is_abandoned() -> None:
    no_client = "never(clients='0 1 2 3 4 5')"
    for method in ("fedavg", "scaffold"):
        experiment = small_experiment(method, {"clients.availability": no_client})
        state, lines = run_rounds(experiment, make_engine("sequential", experiment.task), 2)
        assert all(line["abandoned"] and line["replies"] == 0 for line in lines)
        for name, value in experiment.task.model.initial.params.items():
            assert torch.equal(state.server.model.params[name], value)
        record_trial(
            "all clients drop out", "abandoned, the model did not change", 2, engine="sequential"
        )


@pytest.mark.slow
def test_over_selection_keeps_accuracy_on_digits_over_five_seeds() -> None:
    """With a tenth of the clients unavailable and 130% sampled, no round fails, and the mean
    accuracy is within two points of the run without drop-out.
    """
    base = {
        "data.name": "digits", "data.partition": "dirichlet(alpha=0.3)", "clients.count": 40, "clients.sample": 10, "rounds": 20,
        "local.epochs": 2, "engine": "vectorized", "threads": 1, "record.every": 20,
    }  # fmt: skip
    ends: dict[str, list[float]] = {"without": [], "with": []}
    for seed in range(5):
        for name, changes in (
            ("without", {}),
            ("with", {"clients.availability": "random(offline=0.1)", "round.over_selection": 1.3}),
        ):
            experiment = build(parse_experiment({}, base | {"seed": seed} | changes))
            _, lines = run_rounds(experiment, make_engine("vectorized", experiment.task), 20)
            assert not any(line["abandoned"] for line in lines)
            assert all(line["replies"] == 10 for line in lines)
            ends[name].append(lines[-1]["accuracy"])
    plain, dropped = (100 * float(np.mean(ends[name])) for name in ("without", "with"))
    assert abs(plain - dropped) < 2.0, ends
    said = f"no round of 100 failed; accuracy {dropped:.1f}% with, {plain:.1f}% without drop-out"
    record_trial("10% drop out, 130% are sampled", said, 5, engine="vectorized")
