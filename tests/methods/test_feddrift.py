"""FedDrift against explicit loops over models and clients, through splits and merges; its
decisions by hand; what its lines and records say.
"""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from methods.drifting_task import (
    CLIENTS,
    OPTIMIZERS,
    SEED,
    make_experiment,
    make_net,
    play_states,
    read_batches,
    read_rows,
)
from reference import feddrift as witness
from reference.gossip import State

from remanence.core.errors import AggregationFailed, InputError
from remanence.core.rng import Key
from remanence.core.slots import AssignmentDecision
from remanence.engines.processes import ProcessEngine
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.methods.feddrift import decide, feddrift, measure_distances, merge
from remanence.testing.toy_task import max_rel_diff, state_tree
from remanence.training import server_step
from remanence.training.state import RunState

# everybody moves on to the next of three clusters at every time step, and comes back: models are
# born, shared, merged and left idle
CHANGES: dict[str, Any] = {"drift.time_steps": 6, "rounds": 2, "local.epochs": 5}


def build(method: str, optimizer: str = "sgd", **changes: Any) -> BuiltExperiment:
    return make_experiment(method, optimizer, **CHANGES | changes)


def make_world(experiment: BuiltExperiment, optimizer: str, **changes: Any) -> witness.Scenario:
    given: dict[str, Any] = {
        "net": make_net(),
        "clients": CLIENTS,
        "steps": experiment.config.drift.time_steps,
        "rounds": experiment.config.rounds,
        "batches": read_batches(experiment, {0: experiment.config.local.epochs}),
        "train": read_rows(experiment)("train"),
        "training": OPTIMIZERS[optimizer][1],
    }
    return witness.Scenario(**given | changes)


def gap_of(found: State, wanted: State) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def assert_as_the_reference(
    states: list[RunState], history: dict[str, list[dict[str, Any]]]
) -> None:
    """The model of every client, the models that nobody uses, and the loss each client
    remembers. Numbers of models are nobody's business.
    """
    for state, wanted in zip(states[1:], history["rounds"], strict=True):
        models = [{**server.model.params, **server.model.buffers} for server in state.global_models]
        assert len(models) == len(wanted["models"]), state.round
        uses = state.models_used_by(np.arange(CLIENTS)).tolist()
        for client in range(CLIENTS):
            assert (
                gap_of(models[uses[client]], wanted["models"][wanted["assigned"][client]]) < 1e-10
            ), (state.round, client)
        shared = [[a == b for b in uses] for a in uses]
        assert shared == [[a == b for b in wanted["assigned"]] for a in wanted["assigned"]]
        idle = [
            wanted["models"][number]
            for number in wanted["models"]
            if number not in wanted["assigned"]
        ]
        left = [models[number] for number in range(len(models)) if number not in uses]
        for model in idle:
            assert min(gap_of(mine, model) for mine in left) < 1e-10
        assert state.assignment_state["feddrift"]["last"].tolist() == pytest.approx(
            wanted["last"], abs=1e-10
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("text", "method"),
    [("feddrift(delta=0.2)", witness.Method(0.2)), ("feddrift(delta=0.4)", witness.Method(0.4))],
)
def test_six_time_steps_equal_explicit_loops(
    text: str, method: witness.Method, optimizer: str
) -> None:
    experiment = build(text, optimizer)
    history = witness.play(make_world(experiment, optimizer), method)
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    assert_as_the_reference(states, history)
    stacked, _ = play_states(experiment, VectorizedEngine(experiment.task, 4))
    for mine, wanted in zip(stacked, states, strict=True):
        place, distance = max_rel_diff(state_tree(mine), state_tree(wanted))
        assert distance <= 1e-12, (wanted.round, place)
    assert [line["global_models"] for line in lines] == [
        len(record["models"]) for record in history["rounds"]
    ]
    assert any(decision["alone"] for decision in history["decisions"]), (
        "nobody ever left: the test would show little"
    )


def test_the_story_has_splits_merges_and_idle_models() -> None:
    """Else the comparison above would not have met them."""
    decisions = [
        decision
        for delta in (0.2, 0.4)
        for decision in witness.play(
            make_world(build(f"feddrift(delta={delta})"), "sgd"), witness.Method(delta)
        )["decisions"]
    ]
    assert any(len(decision["alone"]) > 1 for decision in decisions)
    assert any(len(group) > 1 for decision in decisions for group in decision["groups"])
    assert any(set(decision["models"]) - set(decision["assigned"]) for decision in decisions)


def test_a_failed_aggregation_leaves_the_other_models_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two models or more, the aggregation of model 1 fails: it keeps its parameters, the
    others are updated, and the round counts.
    """
    experiment = build("feddrift(delta=0.2)")
    update = server_step.update

    def fail_for_model_1(
        task: Any, server: Any, replies: Any, round: int, key: Any, *rest: Any
    ) -> Any:
        if key == Key(experiment.config.seed).fold_in("round", round).fold_in("model", 1):
            raise AggregationFailed("the new model holds NaN or infinity")
        return update(task, server, replies, round, key, *rest)

    monkeypatch.setattr(server_step, "update", fail_for_model_1)
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    failed = [number for number, line in enumerate(lines) if "problem" in line]
    assert failed
    for number in failed:
        assert lines[number]["problem"] == ("global model 1: the new model holds NaN or infinity")
        before, after = states[number], states[number + 1]
        if len(before.global_models) == len(after.global_models):
            used = set(after.models_used_by(np.arange(CLIENTS)).tolist())
            assert lines[number]["abandoned"] == (used == {1})


def test_by_accuracy_as_the_authors_code() -> None:
    experiment = build("feddrift(delta=0.1, measure='accuracy')")
    history = witness.play(make_world(experiment, "sgd"), witness.Method(0.1, "accuracy"))
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    assert_as_the_reference(states, history)
    assert any(decision["alone"] for decision in history["decisions"])


def test_with_half_of_the_clients_in_a_round() -> None:
    """All clients decide, whoever takes part in the round; a model without participants stays
    as it is.
    """
    experiment = build("feddrift(delta=0.3)", **{"clients.sample": 3})

    def cohort(round: int) -> list[int]:
        return sorted(Key(SEED).fold_in("round", round, "cohort").permutation(CLIENTS)[:3].tolist())

    history = witness.play(make_world(experiment, "sgd", cohort=cohort), witness.Method(0.3))
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    assert_as_the_reference(states, history)
    assert {line["replies"] for line in lines} == {3}


def test_processes_agree_too() -> None:
    experiment = build("feddrift(delta=0.3)+wsm", **{"drift.time_steps": 3})
    states, _ = play_states(experiment, SequentialEngine(experiment.task))
    with closing(ProcessEngine(experiment.task, workers=2)) as engine:
        others, _ = play_states(experiment, engine)
    for mine, wanted in zip(others, states, strict=True):
        assert max_rel_diff(state_tree(mine), state_tree(wanted))[1] <= 1e-12


def test_without_drift_it_is_fedavg() -> None:
    still = {
        "drift.schedule": "",
        "drift.concepts": "",
        "drift.time_steps": 1,
        "drift.samples": 0,
        "drift.validation": 0,
    }
    mine, wanted = (
        play_states(e, SequentialEngine(e.task))[0][-1]
        for e in (build(method, **still) for method in ("feddrift", "fedavg"))
    )
    assert max_rel_diff(mine.server.model._asdict(), wanted.server.model._asdict())[1] == 0


# ------------------------------------------------------------------------------------------ by hand


def decide_by_hand(
    losses: list[list[float]], last: list[float], rows: list[int], delta: float
) -> AssignmentDecision:
    state = {"last": torch.tensor(last, dtype=torch.float64)}
    hyper = {"delta": torch.tensor(delta, dtype=torch.float64)}
    return decide(
        np.array(losses), np.zeros(len(rows), dtype=np.int64), np.array(rows), state, hyper
    )


def test_a_decision_by_hand() -> None:
    """Three models, four clients with 1, 3, 2, 2 rows; delta = .25.

    Client 0 does best with model 1 (.2), client 1 with model 0 (.3), client 3 with model 1 (.1);
    none is worse than before. Client 2 finds .9 at best, of model 0, after .4: it leaves with a
    copy of model 0. Nobody uses model 2: it stays, for its concept may come back. On the rows of
    client 1, model 1 loses .4 - .3 = .1 against model 0. On those of clients 0 and 3 (1 and 2
    rows), model 0 loses ((.5 - .2) * 1 + (.25 - .1) * 2) / 3 = .2 against model 1. The larger is .2
    < .25: models 0 and 1 become one, with 3 and 3 rows: half and half.
    """
    losses = [[0.5, 0.2, 0.9], [0.3, 0.4, 0.8], [0.9, 1.2, 1.0], [0.25, 0.1, 0.7]]
    decision = decide_by_hand(losses, [math.inf, 0.2, 0.4, 0.1], [1, 3, 2, 2], 0.25)
    assert decision.model_of_client.tolist() == [0, 0, 2, 0]
    assert decision.mixing_matrix.tolist() == [[0.5, 0.5, 0], [0, 0, 1], [1, 0, 0]]
    assert decision.state["last"].tolist() == [0.2, 0.3, 0.9, 0.1]
    # at delta = .15 the distance is not below it: both models stay
    apart = decide_by_hand(losses, [math.inf, 0.2, 0.4, 0.1], [1, 3, 2, 2], 0.15)
    assert apart.model_of_client.tolist() == [1, 0, 3, 1]
    assert apart.mixing_matrix.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_weights_of_a_merge_are_rows() -> None:
    """Client 0 with 1 row uses model 0, client 1 with 3 rows model 1, and they hardly differ: a
    quarter and three quarters.
    """
    decision = decide_by_hand([[0.1, 0.2], [0.2, 0.1]], [math.inf, math.inf], [1, 3], 0.5)
    assert decision.mixing_matrix.tolist() == [[0.25, 0.75]]
    assert decision.model_of_client.tolist() == [0, 0]


def test_who_leaves_takes_no_part_in_a_merge() -> None:
    """Both clients leave with copies of the same model: each alone with its own, and the old
    one stays, unused.
    """
    decision = decide_by_hand([[2.0], [3.0]], [1.0, 1.0], [1, 1], 0.5)
    assert decision.model_of_client.tolist() == [1, 2]
    assert decision.mixing_matrix.tolist() == [[1], [1], [1]]


def test_a_rise_by_exactly_delta_is_no_drift() -> None:
    assert decide_by_hand([[1.5]], [1.0], [1], 0.5).model_of_client.tolist() == [0]
    assert decide_by_hand([[1.5]], [0.9], [1], 0.5).model_of_client.tolist() == [1]


def test_a_model_that_is_no_use_to_anybody_costs_nothing() -> None:
    """A loss that is no number counts as infinite (`several`): the other model is taken, and
    nothing is merged with what nobody uses.
    """
    decision = decide_by_hand([[math.inf, 0.4], [math.inf, 0.5]], [0.5, 0.5], [1, 1], 0.5)
    # models keep their order, whether somebody uses them or not
    assert decision.model_of_client.tolist() == [1, 1]
    assert decision.mixing_matrix.tolist() == [[1, 0], [0, 1]]


def test_distances_are_at_least_zero() -> None:
    """Model 1 is better on the rows of model 0's only client, which could not have chosen it:
    such a distance is 0, not below.
    """
    found = measure_distances(
        np.array([[0.5, 0.4], [0.5, 0.4]]), np.array([0, 1]), np.array([1, 1]), np.array([0, 1])
    )
    assert found == {(0, 1): pytest.approx(0.1)}
    found = measure_distances(
        np.array([[0.5, 0.4], [0.3, 0.4]]), np.array([0, 1]), np.array([1, 1]), np.array([0, 1])
    )
    assert found == {(0, 1): 0.0}


def test_complete_linkage_by_hand() -> None:
    """0-1: .1, 1-2: .2, 0-2: .5. At .3 two groups are left, since the farthest members of {0,
    1} and {2} are .5 apart; at .6 one; at .1 three.
    """
    distances = {(0, 1): 0.1, (1, 2): 0.2, (0, 2): 0.5}
    assert [merge([0, 1, 2], distances, delta) for delta in (0.3, 0.6, 0.1)] == [
        [[0, 1], [2]],
        [[0, 1, 2]],
        [[0], [1], [2]],
    ]
    assert merge([4], {}, 1.0) == [[4]]


def test_refusals() -> None:
    with pytest.raises(InputError, match="delta must be a number above 0, not 0"):
        feddrift(delta=0.0)
    with pytest.raises(InputError, match="measure is loss or accuracy, not 'f1'"):
        feddrift(measure="f1")
    with pytest.raises(
        InputError, match="feddrift has several global models, and scaffold is made for one"
    ):
        build("feddrift+scaffold")
    with pytest.raises(InputError, match="hast and feddrift cannot be combined"):
        build("hast(peers=2)+feddrift")
