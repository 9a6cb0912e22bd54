"""Real processes: the engine `flower` equals `sequential` over TLS, and a coordinator or a site that
is killed costs time and nothing else.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ground import PATIENCE, Ground, count_lines, lean, wait_until
from states import assert_equals_loop, last_state

from remanence.config import Experiment
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import build
from remanence.results.run import Run
from remanence.testing.toy_task import max_rel_diff, run_rounds

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.timeout(400)]


def test_methods_equal_loop(ground: Ground, tmp_path: Path) -> None:
    """Plain averaging, a public set at the coordinator, and no server at all; one run of Flower
    for all three, to start up once.
    """
    specs = {
        "fedavg": lean("fedavg", 1),
        "flashback": lean("flashback", 2, **{"data.public": 8}),
        "hast": lean("hast(peers=2, depth=2, finetune_epochs=1)", 1),
    }
    assert_all_equal_loop(ground, specs, tmp_path)


@pytest.mark.slow
def test_more_methods_equal_loop(ground: Ground, tmp_path: Path) -> None:
    """Counts kept at the sites, and single precision."""
    assert_all_equal_loop(
        ground,
        {"fedwavg": lean("fedwavg", 2), "single": lean("scaffold+wsm", 1, precision="fp32")},
        tmp_path,
    )


def assert_all_equal_loop(ground: Ground, specs: dict[str, Experiment], folder: Path) -> None:
    app = ground.prepare(specs)
    said = ground.play(app)
    for name, spec in specs.items():
        run = Run(ground.out(app) / name)
        assert len(run.metrics) == spec.rounds, said[-3000:]
        assert_equals_loop(run, spec, folder / name, 1e-10 if spec.precision == "fp64" else 1e-5)


def test_a_killed_coordinator_goes_on(ground: Ground, tmp_path: Path) -> None:
    """It is killed while its last round is under way; the same command again ends with the same
    model, because the sites kept state and replies.
    """
    spec = lean("scaffold+wsm", 2)
    app = ground.prepare({"experiment": spec})
    before = {site: len(ground.worker_log(site)) for site in ground.sites}
    ground.federation.run(app, PATIENCE, name="doomed")
    wait_until(
        lambda: any(
            "round 2: trained" in ground.worker_log(site)[before[site] :] for site in ground.sites
        ),
        120,
        "a site trains round 2",
    )
    for process in ground.processes("superlink", "flwr-serverapp"):
        process.send_signal(signal.SIGKILL)
    said = ground.play(app)
    run = Run(ground.out(app))
    assert len(run.metrics) == 2, said[-3000:]
    assert "going on with run" in ground.log(app)
    assert any(
        "this request came before" in ground.worker_log(site)[before[site] :]
        for site in ground.sites
    )
    assert_equals_loop(run, spec, tmp_path, 1e-10)


def test_the_rounds_go_on_without_a_killed_site(ground: Ground, tmp_path: Path) -> None:
    """Killed when round 2 is done: round 3 waits for it until its deadline, names it, and ends
    with the model of those that are there.
    """
    spec = lean("fedwavg", 3, **{"clients.sample": 6, "round.deadline": "20"})
    app = ground.prepare({"experiment": spec})
    running = ground.federation.run(app, PATIENCE, name="site-killed")
    wait_until(lambda: count_lines(ground.out(app) / "metrics.jsonl") == 2, 150, "round 2 ends")
    ground.federation.end("site-1", signal.SIGKILL)
    running.wait(100)
    run = Run(ground.out(app))
    assert [line["replies"] for line in run.metrics] == [6, 6, 4]
    assert [(refused["client"], refused["code"]) for refused in run.metrics[-1]["rejected"]] == [
        (2, "no-answer"),
        (3, "no-answer"),
    ]
    assert "site site-1 did not answer in 20 s" in ground.log(app)
    experiment = build(spec.model_copy(update={"engine": "sequential"}))
    without = np.array([True, True, False, False, True, True])
    oracle = replace(experiment, availability=lambda clients, round, key: without | (round < 3))
    state, _ = run_rounds(oracle, SequentialEngine(oracle.task), 3)
    assert (
        max_rel_diff(last_state(run).server.model._asdict(), state.server.model._asdict())[1]
        <= 1e-10
    )
