"""What is traced, captured or compiled is announced, also by worker processes."""

from __future__ import annotations

from contextlib import closing

import pytest

from remanence.core.preparation import COMPILING, listening
from remanence.engines.table import make_engine
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment


@pytest.mark.parametrize("engine", ["vectorized", "processes"])
@pytest.mark.parametrize("execution", ["eager", "captured", "compiled"])
@pytest.mark.filterwarnings("ignore")
def test_preparations_are_announced(engine: str, execution: str) -> None:
    experiment = small_experiment("fedavg", {"data.partition": "iid"})
    work = make_work(experiment, first_state(experiment), 1)
    heard: list[str] = []
    with (
        listening(heard.append),
        closing(make_engine(engine, experiment.task, 1, 2, execution)) as made,
    ):
        list(made.train(work))
    assert set(heard) == {"eager": set(), "captured": {""}, "compiled": {"", COMPILING}}[execution]
    before = len(heard)
    with closing(make_engine(engine, experiment.task, 1, 2, execution)) as made:
        list(made.train(work))
    assert len(heard) == before  # nobody listens
