"""Every slot on every engine: the toy methods are the same on all of them, keep their state
over rounds, and resume exactly.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines.toys import TOYS

from remanence.core.slots import Method, Part
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.losses import wsm
from remanence.methods import fedprox
from remanence.results.run import LEDGER, Run
from remanence.rounds.loop import resume_run, start_run
from remanence.testing import TOLERANCE, check_method
from remanence.testing.toy_task import (
    EQUAL,
    as_method,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)


def with_norms(method: Part | Method, **changes: Any) -> BuiltExperiment:
    return small_experiment(method, EQUAL | changes, module=batch_norm_net())


@pytest.mark.parametrize("setting", ["unequal clients", "batch norm"])
@pytest.mark.parametrize("toy", TOYS)
def test_the_same_on_every_engine(toy: str, setting: str) -> None:
    experiment = (
        small_experiment(TOYS[toy]()) if setting == "unequal clients" else with_norms(TOYS[toy]())
    )
    oracle, lines = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    assert not [line["rejected"] for line in lines if line["rejected"] or line["abandoned"]]
    # other stacks: by the checker below
    for engine in (VectorizedEngine(experiment.task, 2), ProcessEngine(experiment.task, 2)):
        with closing(engine):
            state, _ = run_rounds(experiment, engine, 3)
        place, distance = max_rel_diff(state_tree(state), state_tree(oracle))
        assert distance <= TOLERANCE, f"{engine.name} differs by {distance:.1e} at {place}"


@pytest.mark.parametrize("toy", TOYS)
def test_the_public_checker_agrees(toy: str) -> None:
    check_method(TOYS[toy]())


@pytest.mark.parametrize("toy", TOYS)
def test_every_toy_does_something(toy: str) -> None:
    """Else nothing of the above would mean anything."""
    plain = fedprox(mu=0.1) + wsm() if toy == "many at once" else fedprox(mu=0)
    states = [
        run_rounds(made, SequentialEngine(made.task), 3)[0].server.model.params
        for made in (with_norms(TOYS[toy]()), with_norms(plain))
    ]
    assert max_rel_diff(states[0], states[1])[1] > 1e-6


@pytest.mark.parametrize(
    ("toy", "engine"),
    [
        *((toy, "sequential") for toy in TOYS),
        ("many at once", "vectorized"),
        ("many at once", "processes"),
    ],
)
def test_two_rounds_and_two_more_are_four(toy: str, engine: str, tmp_path: Path) -> None:
    """Bit by bit: the model, what server and clients keep, the metrics and the ledger."""
    method, module = as_method(TOYS[toy]()), batch_norm_net()
    config = with_norms(method, rounds=4, engine=engine, stack_size=2, workers=2).config
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start_run(config, straight, method=method, module=module)
    start_run(config.model_copy(update={"rounds": 2}), broken, method=method, module=module)
    resume_run(broken, rounds=4, method=method, module=module)
    manifests = [
        json.loads((folder / "checkpoints" / "round-0000004" / "manifest.json").read_text())
        for folder in (straight, broken)
    ]
    # SHA-256 of the model and of what the server keeps
    assert manifests[0]["files"] == manifests[1]["files"]
    kept = [
        {client: entry["sha256"] for client, entry in manifest["client_states"].items()}
        for manifest in manifests
    ]
    assert kept[0] == kept[1]
    assert bool(kept[0]) == (toy in ("control_variates", "own_norms", "many at once"))
    lines = [
        [
            {name: value for name, value in line.items() if name != "seconds"}
            for line in Run(folder).metrics
        ]
        for folder in (straight, broken)
    ]
    assert lines[0] == lines[1]
    assert (straight / LEDGER).read_bytes() == (broken / LEDGER).read_bytes()
