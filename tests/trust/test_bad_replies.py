"""Each kind of bad reply on each engine: reported with its code; everything else is as if the
client had not been sampled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from methods.client_models_task import CASES, client_models
from methods.drifting_task import make_experiment, play_states
from rounds.test_run import Tampered, poison, silence
from trust.bad_replies import KINDS
from trust.faults import BAD_REPLIES, record_trial

from remanence.core.engine import Engine
from remanence.core.types import Reply
from remanence.engines.sequential import SequentialEngine
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment
from remanence.testing.toy_task import max_rel_diff, run_rounds, small_experiment, state_tree

BAD, ROUNDS = 3, 2
ENGINES = (
    "sequential",
    "vectorized",
    "processes",
    pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]),
)


def experiment_of(method: str = "scaffold") -> BuiltExperiment:
    """All six clients in every round; scaffold has a payload, client states and a server state."""
    return small_experiment(method, {"clients.sample": 6, "round.max_norm": 1e5})


def spoil_one(kind: str) -> Any:
    def tamper(reply: Reply) -> Iterator[Reply]:
        if int(reply.client) != BAD:
            yield reply
            return
        came = KINDS[kind](reply)
        yield from came if isinstance(came, list) else [came]

    return tamper


@pytest.mark.parametrize("name", ENGINES)
def test_a_bad_reply_is_reported_and_changes_nothing(name: str) -> None:
    if name == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    assert set(KINDS) == set(BAD_REPLIES)
    experiment = experiment_of()
    with closing(make_engine(name, experiment.task, workers=2)) as engine:
        good, _ = run_rounds(experiment, engine, ROUNDS)
        without, quiet = run_rounds(experiment, Tampered(engine, silence), ROUNDS)
        assert all(line["no_response"] == [BAD] and line["rejected"] == [] for line in quiet)
        for kind, code in BAD_REPLIES.items():
            state, lines = run_rounds(experiment, Tampered(engine, spoil_one(kind)), ROUNDS)
            sender = BAD + 1000 if code == "unknown-client" else BAD
            for line in lines:
                assert [(refusal["client"], refusal["code"]) for refusal in line["rejected"]] == [
                    (sender, code)
                ], kind
                assert line["rejected"][0]["reason"]
                assert not line["abandoned"]
            wanted = good if code == "duplicate" else without
            assert max_rel_diff(state_tree(state), state_tree(wanted)) == ("", 0.0), kind
            record_trial(kind, f"rejected as {code}", ROUNDS, engine=name)


@pytest.mark.parametrize("name", ["sequential", "vectorized"])
def test_a_round_of_bad_replies_is_abandoned(name: str) -> None:
    experiment = experiment_of()

    def all_nan(reply: Reply) -> Iterator[Reply]:
        for bad in poison(reply._replace(client=torch.full_like(reply.client, 3))):
            yield bad._replace(client=reply.client)

    def no_weight(reply: Reply) -> Iterator[Reply]:
        yield reply._replace(weight=torch.zeros_like(reply.weight))

    for tamper, code, fault in (
        (all_nan, "not-finite", "all replies of a round are bad"),
        (no_weight, "weight", "all weights are zero"),
    ):
        state, lines = run_rounds(
            experiment, Tampered(make_engine(name, experiment.task), tamper), ROUNDS
        )
        for line in lines:
            assert line["abandoned"]
            assert [(refusal["client"], refusal["code"]) for refusal in line["rejected"]] == [
                (client, code) for client in range(6)
            ]
        for key, value in experiment.task.model.initial.params.items():
            assert torch.equal(state.server.model.params[key], value)
        record_trial(fault, "abandoned, the model did not change", ROUNDS, engine=name)


@pytest.mark.parametrize("name", ["sequential", "vectorized", "processes"])
def test_one_nan_client_of_ten_equals_nine_clients(name: str) -> None:
    experiment = small_experiment(
        "fedavg",
        {
            "data.name": "synthetic(samples=200, classes=4, features=5, test=0.25)",
            "clients.count": 10,
            "clients.sample": 10,
        },
    )
    with closing(make_engine(name, experiment.task, workers=2)) as engine:
        poisoned, lines = run_rounds(experiment, Tampered(engine, poison), 4)
        without, _ = run_rounds(experiment, Tampered(engine, silence), 4)
    assert max_rel_diff(state_tree(poisoned), state_tree(without)) == ("", 0.0)
    assert all(
        [refusal["code"] for refusal in line["rejected"]] == ["not-finite"] and line["replies"] == 9
        for line in lines
    )
    record_trial(
        "one NaN client of ten, every round", "the final model of the other nine", 4, engine=name
    )


@pytest.mark.parametrize(
    "aggregator",
    ["median", "trimmed_mean(fraction=0.2)", "krum(byzantine=1)", "geometric_median", "norm_clip"],
)
def test_a_nan_does_not_reach_a_robust_aggregator(aggregator: str) -> None:
    experiment = experiment_of(f"fedavg+{aggregator}")
    state, lines = run_rounds(
        experiment, Tampered(SequentialEngine(experiment.task), poison), ROUNDS
    )
    assert all(
        [(refusal["client"], refusal["code"]) for refusal in line["rejected"]]
        == [(3, "not-finite")]
        for line in lines
    )
    assert all(bool(torch.isfinite(value).all()) for value in state.server.model.params.values())
    record_trial(
        "a NaN under a robust aggregator",
        "rejected as not-finite; the model finite",
        ROUNDS,
        engine="sequential",
    )


def engines_of(experiment: BuiltExperiment) -> dict[str, Engine]:
    return {
        name: make_engine(name, experiment.task, workers=2)
        for name in ("sequential", "vectorized", "processes")
    }


@pytest.mark.parametrize("case", ["random", "dac", "hast"])
def test_peers_do_not_mix_nan(case: str) -> None:
    experiment = make_experiment(CASES[case][0])
    for name, engine in engines_of(experiment).items():
        with closing(engine):
            states, lines = play_states(experiment, Tampered(engine, poison), rounds=2)
        for state, line in zip(states[1:], lines, strict=True):
            assert [(refusal["client"], refusal["code"]) for refusal in line["rejected"]] == [
                (3, "not-finite")
            ]
            assert all(
                bool(torch.isfinite(value).all())
                for value in client_models(state).models.params.values()
            )
        record_trial(
            "a NaN client among peers",
            "rejected as not-finite; all models finite",
            len(lines),
            engine=name,
        )


@pytest.mark.parametrize("case", ["dac", "hast"])
def test_a_peer_without_a_loss_is_not_mixed_with(case: str) -> None:
    from methods.test_decentralized_mishaps import Unreadable

    experiment = make_experiment(CASES[case][0])
    states, lines = play_states(experiment, Unreadable(experiment.task), rounds=2)
    for line in lines:
        assert {(refusal["client"], refusal["code"]) for refusal in line["rejected"]} <= {
            (2, "probe")
        }
    assert lines[0]["rejected"]
    assert all(
        bool(torch.isfinite(value).all())
        for value in client_models(states[-1]).models.params.values()
    )
    record_trial(
        "a peer whose model has no valid loss",
        "reported as probe, not mixed with",
        len(lines),
        engine="sequential",
    )
