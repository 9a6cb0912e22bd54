"""Comparing a run of a federation with the same experiment on `sequential`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remanence.config import Experiment
from remanence.results.checkpoint import CheckpointStore, fingerprint
from remanence.results.run import CHECKPOINTS, Run
from remanence.rounds.loop import start_run
from remanence.testing.toy_task import max_rel_diff, state_tree
from remanence.training.state import RunState


def last_state(run: Run) -> RunState:
    state = CheckpointStore(run.folder / CHECKPOINTS, fingerprint(run.config)).load(
        torch.device("cpu"), print
    )
    assert state is not None
    return state


def assert_equals_sequential(run: Run, config: Experiment, folder: Path, tolerance: float) -> None:
    """The run has the models, server state and counts of the engine `sequential`. Client states are
    at the sites, so they are not compared.
    """
    reference = start_run(config.model_copy(update={"engine": "sequential"}), folder / "sequential")
    assert not [line for line in run.metrics if line["rejected"] or line["abandoned"]]
    own_state, other_state = (state_tree(last_state(r)) for r in (run, reference))
    for tree in (own_state, other_state):
        del tree["client_states"]
    place, distance = max_rel_diff(own_state, other_state)
    assert distance <= tolerance, f"flower differs from sequential by {distance:.1e} at {place}"
    for mine, other in zip(run.metrics, reference.metrics, strict=True):
        assert (mine["split"], mine["model"]) == (other["split"], other["model"])
        if tolerance <= 1e-10:
            assert mine["per_class"] == other["per_class"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=10 * tolerance)
