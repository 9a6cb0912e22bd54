"""Learning without a server when clients stop, leave, err or have nothing to validate on: still
as the explicit loops, and nobody else is harmed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.client_models_task import (
    CASES,
    assert_as_the_reference,
    assert_stacks_agree,
    client_models,
    gap_of,
    make_world,
    model_of,
)
from methods.drifting_task import (
    CLIENTS,
    OPTIMIZERS,
    ROUNDS,
    SEED,
    STEPS,
    make_experiment,
    make_net,
    play_states,
    read_rows,
)
from reference import decentralized as reference_rounds
from reference.gossip import mean_error
from rounds.test_run import Tampered, poison

from remanence.core.engine import PairCounts
from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.engines.vectorized import VectorizedEngine
from remanence.rounds.early_stopping import update_early_stopping
from remanence.rounds.setup import make_round
from remanence.testing.toy_task import max_rel_diff

OFFLINE = "random(offline=0.4)"


def drawn_online(round: int) -> list[int]:
    return np.flatnonzero(
        Key(SEED).fold_in("round", round, "availability").uniform(CLIENTS) >= 0.4
    ).tolist()


# settings, of the reference's info, of its method
SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "patience": (
        {"peers.patience": 1, "local.optimizer": OPTIMIZERS["sgd"][0].replace("0.1,", "0.6,")},
        {},
        {"patience": 1},
    ),
    "offline at random": ({"clients.availability": OFFLINE}, {"online": drawn_online}, {}),
    "one who never answers": (
        {"clients.availability": "never(clients='2')"},
        {"online": lambda round: [0, 1, 3, 4, 5]},
        {},
    ),
    "a ring": (
        {"peers.topology": "ring"},
        {"neighbors": lambda k: [(k - 1) % CLIENTS, (k + 1) % CLIENTS]},
        {},
    ),
    "all at once": (
        {
            "peers.topology": "ring(neighbors=2)",
            "clients.availability": OFFLINE,
            "peers.patience": 1,
        },
        {
            "online": drawn_online,
            "neighbors": lambda k: [(k + d) % CLIENTS for d in (-2, -1, 1, 2)],
        },
        {"patience": 1},
    ),
}


@pytest.mark.parametrize("case", ["random", "dac", "hast"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations_equal_explicit_loops(situation: str, case: str) -> None:
    settings, info, rules = SITUATIONS[situation]
    text, method = CASES[case]
    experiment = make_experiment(text, **settings)
    training = (
        replace(OPTIMIZERS["sgd"][1], lr=0.6, rate=lambda round: 0.6 * 0.9 ** (max(round, 1) - 1))
        if situation == "patience"
        else None
    )
    more = info | ({"training": training} if training else {})
    history = reference_rounds.play(make_world(experiment, "sgd", **more), replace(method, **rules))
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    assert_as_the_reference(states, history, case != "random")
    assert_stacks_agree(experiment, states)
    valid, known = read_rows(experiment)("valid"), set(range(CLIENTS))  # all warm up
    for line, wanted in zip(lines, history[1:], strict=True):
        assert line["replies"] == len(wanted["active"])
        assert line["early_stopped"] == sum(wanted["stopped"])
        # a client that stopped or went offline keeps its model; after a drift one that has not
        # taken part yet has no accuracy
        known = set(wanted["active"]) | (known if (wanted["round"] - 1) % ROUNDS else set())
        known |= set(range(CLIENTS)) if wanted["step"] == 0 else set()
        errors = [
            mean_error(make_net(), wanted["models"][k], valid(wanted["step"], k)) for k in known
        ]
        assert line["valid_accuracy"] == pytest.approx(1 - sum(errors) / len(errors), abs=1e-12)
    if situation == "patience":
        stopped = [sum(record["stopped"]) for record in history[1:]]
        assert stopped[ROUNDS - 1] > 0
        assert len(history[ROUNDS + 1]["active"]) == CLIENTS  # at the drift everybody trains again
    if "offline" in situation:
        assert [line["offline"] for line in lines] == [
            CLIENTS - len(drawn_online(round)) for round in range(1, STEPS * ROUNDS + 1)
        ]
        assert len({line["offline"] for line in lines}) > 1


@pytest.mark.parametrize("make_engine", [SequentialEngine, VectorizedEngine])
def test_a_client_that_is_refused_keeps_its_model_and_the_others_go_on(
    make_engine: Callable[[Any], Any],
) -> None:
    """Client 3 sends NaN in every round, the warm-up included: it is left with the initial
    model, which its peers go on mixing with.
    """
    experiment = make_experiment(CASES["hast"][0])
    states, lines = play_states(experiment, Tampered(make_engine(experiment.task), poison))
    start = {**make_net().state_dict()}
    for state, line in zip(states[1:], lines, strict=True):
        assert [(refusal["client"], refusal["code"]) for refusal in line["rejected"]] == [
            (3, "not-finite")
        ]
        assert (line["replies"], line["abandoned"]) == (CLIENTS - 1, False)
        for client in range(CLIENTS):
            away = gap_of(model_of(client_models(state).models, client), start)
            assert (away == 0) if client == 3 else (away > 0.01)
    assert all(
        bool(torch.isfinite(value).all())
        for value in client_models(states[-1]).models.params.values()
    )
    assert client_models(states[-1]).peer_counts.sum() == 0  # written down and begun anew
    # its model is validated every round, and never better
    assert client_models(states[ROUNDS]).rounds_since_best[3] == ROUNDS


class Unreadable(SequentialEngine):
    """Looking at the model of client 2 on training rows gives no number."""

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        scores = super().score_pairs(models, which, owners, split, time_step, examples)
        return (
            scores._replace(loss=scores.loss.masked_fill(torch.from_numpy(which == 2), math.nan))
            if split == "train"
            else scores
        )


@pytest.mark.parametrize("case", ["dac", "hast"])
def test_a_loss_that_is_no_number_makes_a_peer_unlike_and_keeps_it_out_of_the_mix(
    case: str,
) -> None:
    """Whoever tried the model of client 2 does not mix with it, and holds it as unlike as can
    be; everybody else ends as in a run without the fault.
    """
    experiment = make_experiment(CASES[case][0])
    tampered, plain = (
        play_states(experiment, engine(experiment.task), rounds=1)
        for engine in (Unreadable, SequentialEngine)
    )
    assert [(refusal["client"], refusal["code"]) for refusal in tampered[1][0]["rejected"]] == [
        (2, "probe")
    ]
    assert plain[1][0]["rejected"] == []
    mine, wanted = (client_models(states[-1]).peers[case] for states, _ in (tampered, plain))
    assert torch.equal(mine["met"], wanted["met"])
    tried = mine["similarity"][:, 2] == 0
    tried[2] = False
    assert 0 < int(tried.sum()) < CLIENTS - 1
    assert (wanted["similarity"][tried, 2] > 0).all()
    assert bool(torch.isfinite(mine["similarity"]).all())
    others = torch.arange(CLIENTS) != 2
    assert torch.equal(mine["similarity"][:, others], wanted["similarity"][:, others])
    for client in range(CLIENTS):
        away = gap_of(
            *(model_of(client_models(states[-1]).models, client) for states, _ in (tampered, plain))
        )
        assert (away > 0.001) if tried[client] else (away == 0)


class Diverged(SequentialEngine):
    """Looks at what the clients start from."""

    started: list[ModelState]

    def train(self, work: Any) -> Any:
        self.started.append(work.start)
        yield from super().train(work)


@pytest.mark.parametrize("case", ["random", "dac", "hast"])
def test_nobody_hears_a_model_that_is_not_finite(case: str) -> None:
    """Client 0 somehow holds NaN, and a place in a mix that is nobody's must not bring it in by
    0 * NaN either: all others stay finite, and it is named.
    """
    experiment = make_experiment(CASES[case][0])
    states, _ = play_states(experiment, SequentialEngine(experiment.task), rounds=1)
    models = client_models(states[-1]).models
    broken = {name: value.clone() for name, value in models.params.items()}
    next(iter(broken.values()))[0] = math.nan
    state = replace(
        states[-1],
        client_models=replace(client_models(states[-1]), models=models._replace(params=broken)),
    )
    engine = Diverged(experiment.task)
    engine.started = []
    with tempfile.TemporaryDirectory() as folder:
        round = make_round(experiment, engine, Path(folder))
        after, line = round.run(state)
        round.close()
    assert {(refusal["client"], refusal["code"]) for refusal in line["rejected"]} == {
        (0, "not-finite")
    }
    for value in [*engine.started[0].params.values(), *client_models(after).models.params.values()]:
        assert bool(torch.isfinite(value[1:]).all())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_a_round_of_nobody_ends_well(case: str, engine: Callable[[Any], Any]) -> None:
    experiment = make_experiment(
        CASES[case][0], **{"clients.availability": "never(clients='0 1 2 3 4 5')"}
    )
    states, lines = play_states(experiment, engine(experiment.task))
    for line in lines:
        assert (line["replies"], line["offline"], line["bytes_up"], line["train_loss"]) == (
            0,
            CLIENTS,
            0,
            None,
        )
        assert (line["same_cluster_share"], line["abandoned"]) == (None, False)
        assert 0 <= line["accuracy"] <= 1
    warm = client_models(states[1]).models.params
    assert all(
        torch.equal(value, warm[name])
        for name, value in client_models(states[-1]).models.params.items()
    )
    # but the warm-up was everybody's
    assert all(
        not torch.equal(value[0], make_net().state_dict()[name]) for name, value in warm.items()
    )


def test_all_stop_and_go_on_with_new_data() -> None:
    """At a rate of 1e-300 nothing changes, so no loss ever falls: with patience 1 all stop
    after round 2, and nobody trains in round 3.
    """
    experiment = make_experiment(
        "local", **{"peers.patience": 1, "local.optimizer": "sgd(lr=1e-300)"}
    )
    states, lines = play_states(experiment, SequentialEngine(experiment.task))
    assert [line["replies"] for line in lines] == [6, 6, 0] * 2
    assert [line["early_stopped"] for line in lines] == [0, 6, 6] * 2
    assert [int(client_models(state).rounds_since_best.max()) for state in states[1:]] == [
        1,
        2,
        2,
    ] * 2


def test_without_warm_up_all_start_alike() -> None:
    """Averages of equal models are that model, so Random's first round is Local's; from the
    second on they part.
    """
    local, random = (
        play_states(e, SequentialEngine(e.task), rounds=2)[0]
        for e in (
            make_experiment(text, **{"peers.warmup": False})
            for text in ("local", "random(peers=2)")
        )
    )
    differences = [
        max_rel_diff(client_models(a).models._asdict(), client_models(b).models._asdict())[1]
        for a, b in zip(local, random, strict=True)
    ]
    assert differences[0] == 0
    assert differences[1] < 1e-14 < 0.01 < differences[2]


def test_without_validation_rows_the_last_model_counts() -> None:
    for name in ("hast", "random"):
        changes = {"drift.validation": 0, "data.validation": 0, "peers.patience": 1}
        experiment = make_experiment(CASES[name][0], **changes)
        for engine in (SequentialEngine(experiment.task), VectorizedEngine(experiment.task, 4)):
            states, lines = play_states(experiment, engine)
            now = client_models(states[-1])
            assert all(
                torch.equal(value, now.best.params[key]) for key, value in now.models.params.items()
            )
            assert now.best_loss.tolist() == [math.inf] * CLIENTS
            assert lines[-1]["valid_accuracy"] is None
            assert not now.early_stopped.any()


def test_a_model_whose_loss_is_no_number_is_not_the_best() -> None:
    """The validation of client 1 gives NaN, though it has rows: its best model stays, and it
    has waited a round more.
    """

    class Confused(SequentialEngine):
        def score_pairs(
            self,
            models: ModelState,
            which: np.ndarray,
            owners: np.ndarray,
            split: str,
            *rest: Any,
            **more: Any,
        ) -> PairCounts:
            scores = super().score_pairs(models, which, owners, split, *rest, **more)
            bad = (
                torch.from_numpy(owners == 1)
                if split == "valid" and self.confused
                else torch.zeros(len(owners), dtype=torch.bool)
            )
            return scores._replace(loss=scores.loss.masked_fill(bad, math.nan))

        confused = False

    experiment = make_experiment("local")
    engine = Confused(experiment.task)
    first, _ = play_states(experiment, engine, rounds=1)
    engine.confused = True
    now = update_early_stopping(engine, client_models(first[-1]), np.arange(CLIENTS), 0, 0)
    assert now.rounds_since_best[1] == client_models(first[-1]).rounds_since_best[1] + 1
    assert now.best_loss[1] == client_models(first[-1]).best_loss[1]
