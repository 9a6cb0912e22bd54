"""Batch norm where clients differ in size: what can be stacked is, what cannot is refused with
the cure, and auto never picks it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.test_equal_engines import with_clients
from torch import nn

from remanence.core.errors import InputError
from remanence.core.progress import NullProgress
from remanence.data.population import ClientData, PartitionIndices
from remanence.engines import autotune
from remanence.engines.autotune import choose_engine, choose_execution
from remanence.engines.cost import Workload
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.federated import make_work
from remanence.rounds.loop import start_run
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE
from remanence.testing.toy_task import (
    BatchNormNet,
    batch_norm_net,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)

UNEQUAL: dict[str, Any] = {
    "data.partition": "quantity(power=0.7, minimum=4)",
    "local.batch_size": 4,
}  # 6 to 12 rows: short last batches, none of one row


def distance_from_loop(experiment: BuiltExperiment, stack: int) -> float:
    oracle, _ = run_rounds(experiment, SequentialEngine(experiment.task), 3)
    state, _ = run_rounds(experiment, VectorizedEngine(experiment.task, stack), 3)
    return max_rel_diff(state_tree(state), state_tree(oracle))[1]


class Listener(NullProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)


def test_stacked_refuses_padded_batch_norm_and_names_the_cure(tmp_path: Path) -> None:
    module = batch_norm_net()
    config = small_experiment("fedavg", UNEQUAL | {"engine": "vectorized"}, module=module).config
    cure = (
        r"batch norm.*use engine=sequential, clients of equal size, local\.drop_last=true, or a"
        r" model with group norm"
    )
    with pytest.raises(InputError, match=cure):
        start_run(config, tmp_path / "run", module=module)
    assert not (tmp_path / "run").exists()


def test_auto_takes_loop_for_padded_batch_norm_and_says_so(tmp_path: Path) -> None:
    module, listener = batch_norm_net(), Listener()
    config = small_experiment(
        "fedavg", UNEQUAL | {"engine": "auto", "rounds": 1}, module=module
    ).config
    run = start_run(config, tmp_path / "run", module=module, progress=listener)
    assert run.config.engine == "sequential"
    assert "batch norm with clients of different sizes cannot be stacked" in run.metadata["engine"]
    (said,) = listener.said
    name, _, reason = run.metadata["engine"].partition(": ")
    assert said == f"Using engine '{name}': {reason}; about 1 s of local training in all."


def two_clients(sizes: tuple[int, int], module: nn.Module) -> BuiltExperiment:
    """Clients of exactly these sizes."""
    experiment = small_experiment(
        "fedavg", {"clients.count": 2, "clients.sample": 2}, module=module
    )
    parts, nothing = np.split(np.arange(sum(sizes)), [sizes[0]]), np.empty(0, dtype=np.int64)
    client_data = ClientData(
        PartitionIndices.concat(parts),
        PartitionIndices.concat([nothing, nothing]),
        np.zeros(2, np.int64),
    )
    population = replace(experiment.task.population, time_steps=(client_data,))
    return replace(experiment, task=replace(experiment.task, population=population))


def test_batch_norm_without_padding_may_have_unequal_clients() -> None:
    """6 examples at batch 4 make batches of 4 and 2, 4 examples one of 4: widths agree wherever
    both have a step.
    """
    assert distance_from_loop(two_clients((6, 4), batch_norm_net()), stack=64) <= TOLERANCE


def test_auto_can_run_batch_norm_that_needs_no_padding() -> None:
    """6 examples at batch 4 make widths 4, 2 in an epoch, 4 examples make 4; but in three
    steps, as a trial might make, 4, 2, 4 and 4, 4, 4.
    """
    experiment = two_clients((6, 4), batch_norm_net())
    assert choose_engine(
        experiment.task, make_work(experiment, first_state(experiment), 1)
    ).name in ("sequential", "vectorized")


def test_batch_norm_without_running_statistics_is_refused_too() -> None:
    """In training it uses the batch's statistics like any other."""
    module = BatchNormNet()
    module.norm = nn.BatchNorm1d(6, track_running_stats=False)
    experiment = small_experiment("fedavg", UNEQUAL, module=module)
    with pytest.raises(InputError, match="batch norm"):
        VectorizedEngine(experiment.task)


def test_frozen_batch_norm_can_be_padded() -> None:
    """It evaluates each example alone."""
    experiment = small_experiment(
        "fedavg", UNEQUAL | {"local.buffers": "frozen"}, module=batch_norm_net()
    )
    assert distance_from_loop(experiment, stack=3) <= TOLERANCE


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_batch_of_one_is_refused_with_the_cure(engine: str, tmp_path: Path) -> None:
    """The built-in task has clients with a single example."""
    module = batch_norm_net()
    with pytest.raises(InputError, match=r"batch norm.*local\.batch.*drop_last.*group norm"):
        start_run(
            small_experiment("fedavg", {"engine": engine}, module=module).config,
            tmp_path / "run",
            module=module,
        )


def test_clients_are_stacked_whose_trial_alone_would_need_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four and six examples in batches of 4: equal batches where both clients have one, but in a
    trial of more steps the batch of two meets one of four.
    """
    small = small_experiment("fedavg", UNEQUAL | {"local.epochs": 1}, module=batch_norm_net())
    experiment = with_clients(small, [4, 6])
    work = make_work(experiment, first_state(experiment), 1)
    ticks = itertools.count()
    monkeypatch.setattr(autotune, "SHORT", 0)
    choice = choose_execution(experiment.task, work, 64, lambda: float(next(ticks)), Workload())
    assert choice.name == "vectorized"
    # one second for three steps: one of the smaller client, two of the other
    assert "333.33 ms per local step" in choice.reason
    assert "vectorized" in choose_engine(experiment.task, work, workers=1).reason
