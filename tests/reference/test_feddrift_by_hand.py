"""The reference of FedDrift against numbers computed by hand, with the network of `one_number`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from reference import feddrift
from reference.gossip import Rows
from reference.one_number import PLAIN, make_net, number, rows, softplus, state_of


def test_complete_linkage_on_three_models() -> None:
    """Distances 0-1: .1, 1-2: .2, 0-2: .5.

    0 and 1 are closest and are merged; the farthest member of this group is .5 from 2. So at delta
    .3 two groups are left (single linkage would leave one), at .6 one. At delta .1 nothing is
    merged, because .1 is not below it.
    """
    distances = {(0, 1): 0.1, (1, 2): 0.2, (0, 2): 0.5}
    assert feddrift.link([0, 1, 2], distances, 0.3) == [[0, 1], [2]]
    assert feddrift.link([0, 1, 2], distances, 0.6) == [[0, 1, 2]]
    assert feddrift.link([0, 1, 2], distances, 0.1) == [[0], [1], [2]]


def test_distance_is_the_larger_loss_of_going_to_the_other() -> None:
    # Model 1 is .4 worse than model 0 on the data of 0; model 0 is .1 worse than model 1 on the
    # data of 1: .4. If it is .7 worse there: .7. Never below 0.
    assert feddrift.distances_between({(0, 0): 0.2, (1, 0): 0.6, (0, 1): 0.4, (1, 1): 0.3}) == {
        (0, 1): pytest.approx(0.4)
    }
    assert feddrift.distances_between({(0, 0): 0.2, (1, 0): 0.6, (0, 1): 1.0, (1, 1): 0.3}) == {
        (0, 1): pytest.approx(0.7)
    }
    assert feddrift.distances_between({(0, 0): 0.2, (1, 0): 0.1, (0, 1): 0.2, (1, 1): 0.3}) == {
        (0, 1): 0.0
    }


def test_drift_is_a_rise_of_the_lowest_loss_above_delta() -> None:
    # Client 0: lowest .5 <= .3 + .25 stays with 4. Client 1: .5 > .2 + .25 starts a new model; client
    # 2, .7 > .4 + .25, too. Client 3 ties: the first.
    losses = [{1: 0.9, 4: 0.5}, {1: 0.5, 4: 0.9}, {1: 0.9, 4: 0.7}, {1: 0.6, 4: 0.6}]
    found = feddrift.detect(losses, [0.3, 0.2, 0.4, math.inf], 0.25, next_number=5)
    assert found == ([4, 1, 4, 1], [4, 5, 6, 1], {1: 5, 2: 6})


def make_drift(**changes: Any) -> feddrift.Scenario:
    given: dict[str, Any] = {
        "net": make_net(),
        "clients": 3,
        "steps": 2,
        "rounds": 1,
        "training": PLAIN,
    }
    given |= {"batches": lambda round, client, phase: [], "train": lambda step, client: rows(0)}
    return feddrift.Scenario(**given | changes)


@pytest.mark.parametrize(
    ("delta", "groups", "models"),
    [(0.6, [[0, 1]], {0: 1.25, 2: 1}), (0.5, [[0], [1]], {0: 1, 1: 2, 2: 1})],
)
def test_a_decision_by_hand(
    delta: float, groups: list[list[int]], models: dict[int, float]
) -> None:
    """Models 0 and 1 are u = 1 and u = 2. With l(u) = softplus(-2u): l(1) = .127, l(2) = .018.

    Client 0, one row of label 0: losses l(1), l(2): takes model 1. Client 1, labels 0 0 1: l(u) +
    2u/3, .794 and 1.351: takes model 0. Client 2, one row of label 1: l(u) + 2u, 2.127 and 4.018,
    after .9 last time: leaves with a copy of model 0, as model 2, and takes no part in the merging.
    Model 1 loses l(2) - l(1) + 2/3 = .558 on the rows of client 1; model 0 loses l(1) - l(2) = .109
    on those of client 0: distance .558. Merged by rows: (3 * 1 + 1 * 2) / 4 = 1.25.
    """
    data = [rows(0), rows(0, 0, 1), rows(1)]
    scenario = make_drift(train=lambda step, client: data[client])
    run = feddrift.RunState(
        {0: state_of(1.0), 1: state_of(2.0)}, [0, 0, 0], [math.inf, math.inf, 0.9], 2
    )
    happened = feddrift.decide(scenario, feddrift.Method(delta), run, 1)
    near, far = softplus(-2), softplus(-4)
    assert happened["losses"][1] == pytest.approx({0: near + 2 / 3, 1: far + 4 / 3})
    assert happened["last"] == pytest.approx([far, near + 2 / 3, near + 2])
    assert happened["best"] == [1, 0, 0]
    assert happened["alone"] == {2: 2}
    assert happened["distances"] == {(0, 1): pytest.approx(far - near + 2 / 3)}
    assert happened["groups"] == groups
    assert happened["assigned"] == [groups[-1][0], 0, 2]
    assert {i: number(state) for i, state in happened["models"].items()} == pytest.approx(models)


def test_who_leaves_copies_its_best_model_under_a_new_number() -> None:
    # One client with label 0, whose loss was 0: softplus(-4) = .018 of its best model, u = 2, is
    # above delta = .01, so model 2 is a copy of that.
    # With label 1 in the next time step models 0, 1, 2 lose softplus(2), softplus(4), softplus(4),
    # all far above .018 + .01: a copy of u = 1, as model 3.
    scenario = make_drift(clients=1, train=lambda step, client: rows(step - 1))
    run = feddrift.RunState({0: state_of(1.0), 1: state_of(2.0)}, [0], [0.0], 2)
    first = feddrift.decide(scenario, feddrift.Method(0.01), run, 1)
    assert {i: number(state) for i, state in first["models"].items()} == {0: 1, 1: 2, 2: 2}
    second = feddrift.decide(scenario, feddrift.Method(0.01), run, 2)
    assert second["alone"] == {0: 3}
    assert {i: number(state) for i, state in second["models"].items()} == {0: 1, 1: 2, 2: 2, 3: 1}


def test_a_decision_by_accuracy() -> None:
    # Both models call every row 0: errors 0, 1/3, 1 whatever the model; the first is taken, and 1 >
    # .9 + .05 is a drift.
    data = [rows(0), rows(0, 0, 1), rows(1)]
    run = feddrift.RunState(
        {0: state_of(1.0), 1: state_of(2.0)}, [0, 0, 0], [math.inf, 0.3, 0.9], 2
    )
    happened = feddrift.decide(
        make_drift(train=lambda step, client: data[client]),
        feddrift.Method(0.05, "accuracy"),
        run,
        1,
    )
    assert happened["last"] == pytest.approx([0, 1 / 3, 1])
    assert happened["assigned"] == [0, 0, 2]


def test_feddrift_over_three_time_steps() -> None:
    """Three clients with 1, 1 and 2 rows; they train in the first round alone, on x = 2, 2, 4, to
    1, 1 and 2 (as above), mixed (1 + 1 + 2 * 2) / 4 = 3/2.

    Time step 1 changes the labels of client 2, but there is no loss to compare with yet:
    softplus(3) becomes its last one. In time step 2 clients 0 and 1 change as well: from
    softplus(-3) to softplus(3), by 3, above delta = 1, so each leaves for a model of its own.
    Client 2, whose data stay, takes model 0, for nothing has changed there. Only client 0 takes
    part in the last round, on one row (x = 2, label 1).
    """

    def data(step: int, client: int) -> Rows:
        label = int(step >= 1) if client == 2 else int(step >= 2)
        return rows(label, label) if client == 2 else rows(label)

    def batches(round: int, client: int, phase: int) -> list[Rows]:
        first = [rows(0, x=4.0 if client == 2 else 2.0)]
        return {1: first, 2: [], 3: [rows(1, x=2.0)]}[round]

    scenario = make_drift(
        steps=3, train=data, batches=batches, cohort=lambda round: [0] if round == 3 else [0, 1, 2]
    )
    history = feddrift.play(scenario, feddrift.Method(1.0))
    assert number(history["rounds"][0]["models"][0]) == pytest.approx(1.5)
    first, second = history["decisions"]
    assert first["assigned"] == [0, 0, 0]
    assert first["last"] == pytest.approx([softplus(-3), softplus(-3), softplus(3)])
    assert second["alone"] == {0: 1, 1: 2}
    assert second["assigned"] == [1, 2, 0]
    last = {i: number(state) for i, state in history["rounds"][2]["models"].items()}
    # At u = 3/2 and x = 2 the probability of label 0 is 1 / (1 + e^-6), the gradient of u is 2 of
    # it.
    assert last == pytest.approx({0: 1.5, 1: 1.5 - 2 / (1 + math.exp(-6)), 2: 1.5})
