"""Centralized training against plain PyTorch: the model, and every forgetting event of every
example.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods.small_task import in_plain_tensors, largest_gap, make_experiment, make_net
from methods.test_frozen_head import TWO, two_layers
from reference import centralized as witness

from remanence.core.rng import Key
from remanence.core.types import Output
from remanence.data.batches import plan_batches
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.methods.centralized import centralized, correct_and_margin
from remanence.methods.frozen_head import frozen_head
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_three_rounds_equal_plain_pytorch(
    engine: type[SequentialEngine] | type[VectorizedEngine],
) -> None:
    """Six clients' rows as one client's; a last batch that is shorter than the others; events
    of every round and, kept, of every example.
    """
    bold = {"local.optimizer": "sgd(lr=0.5, momentum=0.9)", "local.epochs": 2}
    experiment = make_experiment(centralized(), "mlp", **bold)
    rows = experiment.task.population.at(0).train.for_client(0)
    assert experiment.task.info.num_clients == 1
    assert len(rows) % 4 > 0
    parted = make_experiment(frozen_head(), "mlp")
    plain, net = in_plain_tensors(parted, lr=0.5, weight_decay=0.0, epochs=2), make_net("mlp")
    assert sorted(rows.tolist()) == sorted(np.concatenate(plain.rows).tolist())
    history = witness.train(net, plain.x, plain.y, rows, plain.setting)
    state, lines = run_rounds(experiment, engine(experiment.task), 3)
    assert (
        largest_gap(
            state, {name: value.detach() for name, value in net.state_dict().items()}, "mlp"
        )
        < 1e-10
    )
    for kind in ("right_to_wrong", "margin_rise"):
        in_rounds = [sum(events[kind].values()) for events in history]
        assert [line["payload"][f"centralized.{kind}"] for line in lines] == in_rounds
        assert len(set(in_rounds)) == 3
        wanted = torch.zeros(len(plain.y), dtype=torch.int64)
        for events in history:
            for example, times in events[kind].items():
                wanted[example] += times
        assert torch.equal(state.client_states[0]["centralized"][kind], wanted)
        assert int(wanted.max()) > 0


def pair(second_label: int) -> ArrayDataset:
    train = DatasetSplit(
        np.array([[1.0], [3.0]], dtype=np.float32), np.array([0, second_label]), np.array([0, 1])
    )
    return ArrayDataset(
        "pair", "table", ("0", "1"), train, DatasetSplit(train.x, train.y), group_names=("A", "B")
    )


def events_of_one_round(source: ArrayDataset, seed: int) -> tuple[bool, dict[str, list[int]]]:
    """-> did the row x = 1 come first, the events of both rows"""
    experiment = small_experiment(
        centralized() + frozen_head(),
        TWO | {"local.batch_size": 1, "seed": seed},
        module=two_layers(0.0, (1.0, -1.0)),
        source=source,
    )
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    plan = plan_batches(Key(seed).fold_in("round", 1, "client", 0, "plan", 0), 2, 1, epochs=1)
    return bool(plan.indices[0, 0] == 0), {
        kind: counts.tolist() for kind, counts in state.client_states[0]["centralized"].items()
    }


def test_a_pair_by_hand() -> None:
    """Logits (wx, -wx), w = 0, rate 0.1, rows x = 1 of class 0 and x = 3 of class 1; dL/dw = -2 p_1
    x for class 0 and 2 p_0 x for class 1.

    x = 1 first: w = 0.1, its margin error is -2wx = -0.2 and it is right. Then p_0 = s(2 * 0.1 * 3)
    = s(0.6) = 0.646 and w = 0.1 - 0.1 * 6 * 0.646 = -0.287: the first row is wrong, with error
    0.575: both events. x = 3 first: w = -0.3, error 2wx = -1.8, right. Then p_1 = s(0.6) = 0.646
    and w = -0.3 + 0.2 * 0.646 = -0.171: still right, with error -1.025: a rise.
    """
    seen = set()
    for seed in range(6):
        small_first, events = events_of_one_round(pair(second_label=1), seed)
        wanted = (
            {"right_to_wrong": [1, 0], "margin_rise": [1, 0]}
            if small_first
            else {"right_to_wrong": [0, 0], "margin_rise": [0, 1]}
        )
        assert events == wanted
        seen.add(small_first)
    assert seen == {True, False}


def test_rows_that_help_each_other_are_not_forgotten() -> None:
    """Both of class 0: each step raises w, so that no margin error grows."""
    assert events_of_one_round(pair(second_label=0), 0)[1] == {
        "right_to_wrong": [0, 0],
        "margin_rise": [0, 0],
    }


def test_margin_error_by_hand() -> None:
    """The largest wrong logit less the true one: 3 - 2, 1 - 3, 0 - 0; of equal logits the first
    is the answer, as in every score.
    """
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, -1.0, 3.0], [0.0, 0.0, -1.0]])
    right, error = correct_and_margin(Output(logits, logits), torch.tensor([1, 2, 1]))
    assert right.tolist() == [False, True, False]
    assert error.tolist() == [1.0, -2.0, 0.0]


def test_counting_changes_nothing() -> None:
    with_events, without = (
        make_experiment(centralized(events=events), "mlp") for events in (True, False)
    )
    (counted, _), (plain, lines) = (
        run_rounds(experiment, SequentialEngine(experiment.task), 2)
        for experiment in (with_events, without)
    )
    assert all(
        torch.equal(value, plain.server.model.params[name])
        for name, value in counted.server.model.params.items()
    )
    assert lines[0]["payload"] == {}
    assert plain.client_states == {}


@pytest.mark.parametrize("events", [True, False])
def test_contract(events: bool) -> None:
    check_method(centralized(events=events))
