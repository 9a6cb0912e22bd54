"""A state that somebody else wrote, digests and all, is judged by its form before a run goes on
from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remanence.core.errors import CheckpointError
from remanence.core.files import FilePrefix
from remanence.core.types import ModelState
from remanence.results.checkpoint import CheckpointStore
from remanence.results.checkpoint_schema import check_schema
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import drifting_experiment, small_experiment
from remanence.training.server_step import Server
from remanence.training.state import RunState


def with_params(state: RunState, **changes: torch.Tensor) -> RunState:
    model = state.server.model
    return replace(
        state, server=Server(ModelState(model.params | changes, model.buffers), state.server.state)
    )


def test_a_state_fits_itself() -> None:
    for made in (
        small_experiment("scaffold"),
        drifting_experiment("hast(peers=2)", 2),
        drifting_experiment("feddrift", 2),
    ):
        check_schema(first_state(made), first_state(made))


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (
            lambda state: with_params(state, **{"head.bias": torch.zeros(7, dtype=torch.float64)}),
            r"head.bias of \(7,\)",
        ),
        (lambda state: with_params(state, **{"head.bias": torch.zeros(4)}), "torch.float32"),
        (
            lambda state: with_params(state, spy=torch.zeros(1)),
            "other names than the experiment's: params/spy",
        ),
        (
            lambda state: first_state(drifting_experiment("random(peers=2)", 2)),
            "another kind of method",
        ),
        (lambda state: first_state(drifting_experiment("feddrift", 2)), "another kind of method"),
    ],
)
def test_a_state_of_something_else(spoil: Callable[[RunState], RunState], fault: str) -> None:
    form = first_state(small_experiment("fedavg"))
    with pytest.raises(CheckpointError, match=fault):
        check_schema(spoil(form), form)


def test_clients_use_models_that_exist() -> None:
    form = first_state(drifting_experiment("feddrift", 2))
    with pytest.raises(CheckpointError, match="a model that it does not hold"):
        check_schema(replace(form, model_of_client=torch.full((6,), 3)), form)


def test_a_table_over_clients_has_as_many_as_there_are() -> None:
    form = first_state(drifting_experiment("random(peers=2)", 2))
    assert form.client_models is not None
    with pytest.raises(CheckpointError, match="rounds_since_best"):
        check_schema(
            replace(
                form,
                client_models=replace(
                    form.client_models, rounds_since_best=torch.zeros(5, dtype=torch.int64)
                ),
            ),
            form,
        )


@pytest.mark.parametrize(
    ("name", "length"), [("../metrics.jsonl", 1), ("metrics.jsonl", -1), ("metrics.jsonl", 11)]
)
def test_a_checkpoint_vouches_only_for_what_is_there(
    tmp_path: Path, name: str, length: int
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"0123456789")
    form = first_state(small_experiment("fedavg"))
    CheckpointStore(tmp_path / "checkpoints", "run").save(
        replace(form, committed={name: FilePrefix(length, hashlib.sha256(b"0123456789"[:length]))})
    )
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        CheckpointStore(tmp_path / "checkpoints", "run").load(
            torch.device("cpu"), lambda text: None
        )
