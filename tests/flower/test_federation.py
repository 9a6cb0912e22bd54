"""Real processes: the engine `flower` equals `sequential` over TLS, and killing a coordinator or a
site costs time only.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import TIMEOUTS, Harness, count_lines, lean, wait_until
from run_states import assert_equals_sequential, last_state

from remanence.config import Experiment
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import build
from remanence.results.run import Run
from remanence.testing.toy_task import max_rel_diff, run_rounds

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.timeout(400)]


def test_methods_equal_sequential(harness: Harness, tmp_path: Path) -> None:
    """Plain averaging, a public set at the coordinator, and no server; one run of Flower for all
    three, to start it once.
    """
    configs = {
        "fedavg": lean("fedavg", 1),
        "flashback": lean("flashback", 2, **{"data.public": 8}),
        "hast": lean("hast(peers=2, depth=2, finetune_epochs=1)", 1),
    }
    assert_all_equal_sequential(harness, configs, tmp_path)


@pytest.mark.slow
def test_more_methods_equal_sequential(harness: Harness, tmp_path: Path) -> None:
    """Client states at the sites, and single precision."""
    assert_all_equal_sequential(
        harness,
        {"fedwavg": lean("fedwavg", 2), "single": lean("scaffold+wsm", 1, precision="fp32")},
        tmp_path,
    )


def assert_all_equal_sequential(
    harness: Harness, configs: dict[str, Experiment], folder: Path
) -> None:
    app = harness.prepare(configs)
    output = harness.run(app)
    for name, config in configs.items():
        run = Run(harness.out(app) / name)
        assert len(run.metrics) == config.rounds, output[-3000:]
        assert_equals_sequential(
            run, config, folder / name, 1e-10 if config.precision == "fp64" else 1e-5
        )


def test_a_killed_coordinator_resumes(harness: Harness, tmp_path: Path) -> None:
    """It is killed in its last round; the same command again ends with the same model, because the
    sites stored states and replies.
    """
    config = lean("scaffold+wsm", 2)
    app = harness.prepare({"experiment": config})
    before = {site: len(harness.daemon_log(site)) for site in harness.sites}
    harness.federation.run(app, TIMEOUTS, name="killed")
    wait_until(
        lambda: any(
            "round 2: trained" in harness.daemon_log(site)[before[site] :] for site in harness.sites
        ),
        120,
        "a site trains round 2",
    )
    for process in harness.processes("superlink", "flwr-serverapp"):
        process.send_signal(signal.SIGKILL)
    output = harness.run(app)
    run = Run(harness.out(app))
    assert len(run.metrics) == 2, output[-3000:]
    assert "resuming run" in harness.log(app)
    assert any(
        "a repeated request gets the stored reply" in harness.daemon_log(site)[before[site] :]
        for site in harness.sites
    )
    assert_equals_sequential(run, config, tmp_path, 1e-10)


def test_the_rounds_continue_without_a_killed_site(harness: Harness, tmp_path: Path) -> None:
    """Killed after round 2: round 3 waits for it until its deadline, reports it, and ends with the
    model of the other sites.
    """
    config = lean("fedwavg", 3, **{"clients.sample": 6, "round.deadline": "20"})
    app = harness.prepare({"experiment": config})
    running = harness.federation.run(app, TIMEOUTS, name="site-killed")
    wait_until(lambda: count_lines(harness.out(app) / "metrics.jsonl") == 2, 150, "round 2 ends")
    harness.federation.end("site-1", signal.SIGKILL)
    running.wait(100)
    run = Run(harness.out(app))
    assert [line["replies"] for line in run.metrics] == [6, 6, 4]
    assert [
        (rejection["client"], rejection["code"]) for rejection in run.metrics[-1]["rejected"]
    ] == [
        (2, "no-answer"),
        (3, "no-answer"),
    ]
    assert "site site-1 did not respond in 20 s" in harness.log(app)
    experiment = build(config.model_copy(update={"engine": "sequential"}))
    without = np.array([True, True, False, False, True, True])
    reference = replace(
        experiment, availability=lambda clients, total, round, key: (without | (round < 3))[clients]
    )
    state, _ = run_rounds(reference, SequentialEngine(reference.task), 3)
    assert (
        max_rel_diff(last_state(run).server.model._asdict(), state.server.model._asdict())[1]
        <= 1e-10
    )
