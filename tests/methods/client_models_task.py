"""Learning without a server for both witnesses: the methods in both languages, the reference's
info, and what must be equal after every round.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from methods.drifting_task import (
    CLIENTS,
    OPTIMIZERS,
    ROUNDS,
    SEED,
    STEPS,
    make_net,
    play_states,
    read_batches,
    read_rows,
)
from reference.decentralized import Method, Scenario
from reference.gossip import State

from remanence.core.rng import Key
from remanence.core.types import ModelState
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.peers.peer_sampling import sample_uniform, sample_weighted
from remanence.testing.toy_task import max_rel_diff, state_tree
from remanence.training.state import ClientModels, RunState

CASES: dict[str, tuple[str, Method]] = {
    "random": ("random(peers=2)", Method("random", peers=2)),
    "random, more than there are": ("random(peers=9)", Method("random", peers=9)),
    "dac": ("dac(peers=2, tau=3)", Method("dac", peers=2, tau=3.0)),
    "dac, tau growing": (
        "dac(peers=2, tau=30, schedule=true)",
        Method("dac", peers=2, tau=30.0, published_tau=True),
    ),
    "dac, first measurement overwritten": (
        "dac(peers=2, tau=3, overwrite_first=true)",
        Method("dac", peers=2, tau=3.0, hearsay_wins=True),
    ),
    "hast": (
        "hast(peers=2, tau=3, depth=1, finetune_epochs=2)",
        Method("hast", peers=2, tau=3.0, depth=1),
    ),
    "hast, fresh": (
        "hast(peers=2, tau=3, depth=1, finetune_epochs=2, fresh=true)",
        Method("hast", peers=2, tau=3.0, depth=1, fresh=True),
    ),
    "hast, two layers": (
        "hast(peers=3, depth=2, finetune_epochs=1)",
        Method("hast", peers=3, depth=2),
    ),
    "hast, all layers": (
        "hast(peers=2, depth=9, finetune_epochs=1)",
        Method("hast", peers=2, depth=9),
    ),
    "hast, no layer": (
        "hast(peers=2, depth=0, finetune_epochs=2)",
        Method("hast", peers=2, depth=0),
    ),
    "hast, not tuned": (
        "hast(peers=2, depth=1, finetune_epochs=0)",
        Method("hast", peers=2, depth=1),
    ),
    "oracle": ("oracle(peers=2)", Method("oracle", peers=2)),
    "local": ("local", Method("local")),
}


def make_world(
    experiment: BuiltExperiment, optimizer: str, kind: str = "mlp", **changes: Any
) -> Scenario:
    """The experiment as the reference sees it. It says who may be asked and with what chances;
    only the noise of a draw is the program's.
    """
    arguments = experiment.task.method.part_filling("peers").arguments  # type: ignore[union-attr]
    rows = read_rows(experiment)

    def draw(
        round: int,
        client: int,
        candidates: list[int],
        scores: list[float],
        count: int,
        purpose: str,
    ) -> list[int]:
        table, reachable = (
            torch.zeros(CLIENTS, CLIENTS, dtype=torch.float64),
            torch.zeros(CLIENTS, CLIENTS, dtype=torch.bool),
        )
        reachable[client, candidates] = True
        table[client, candidates] = torch.tensor(scores, dtype=torch.float64)
        key = Key(SEED).fold_in("round", round, "peers", purpose)
        drawn = (
            sample_uniform(reachable, count, key)
            if purpose == "random"
            else sample_weighted(table, reachable, count, key)
        )
        return [int(peer) for peer in drawn[client] if peer >= 0]

    given: dict[str, Any] = {
        "net": make_net(kind),
        "clients": CLIENTS,
        "steps": STEPS,
        "rounds": ROUNDS,
        "batches": read_batches(experiment, {0: 1, 1: int(arguments.get("finetune_epochs", 0))}),
        "train": rows("train"),
        "valid": rows("valid"),
        "choose_uniform": lambda round, k, candidates, count: draw(
            round, k, candidates, [0.0] * len(candidates), count, "random"
        ),
        "choose_weighted": lambda round, k, candidates, chances, count: draw(
            round, k, candidates, [math.log(p) for p in chances], count, "similar"
        ),
        "training": OPTIMIZERS[optimizer][1],
        "cluster": lambda step, client: int(experiment.task.population.at(step).cluster[client]),
    }
    return Scenario(**given | changes)


def client_models(state: RunState) -> ClientModels:
    assert state.client_models is not None
    return state.client_models


def model_of(models: ModelState, client: int) -> State:
    """A client's model as a state dict."""
    return {name: value[client] for tree in models for name, value in tree.items()}


def gap_of(found: State, wanted: State) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in wanted)


def assert_as_the_reference(
    states: list[RunState], history: list[dict[str, Any]], likeness: bool
) -> None:
    """Everything that lasts from round to round, after every round."""
    assert len(states) == len(history)
    for state, wanted in zip(states[1:], history[1:], strict=True):
        now = client_models(state)
        for client in range(CLIENTS):
            assert gap_of(model_of(now.models, client), wanted["models"][client]) < 1e-10, (
                state.round,
                client,
            )
            assert gap_of(model_of(now.best, client), wanted["best_models"][client]) < 1e-10, (
                state.round,
                client,
            )
        assert now.best_loss.tolist() == pytest.approx(wanted["best_loss"], abs=1e-10)
        assert now.rounds_since_best.tolist() == wanted["patience"]
        assert now.early_stopped.tolist() == wanted["stopped"]
        if likeness:
            (remembered,) = now.peers.values()
            for mine, theirs in zip(
                remembered["similarity"].tolist(), wanted["similarities"], strict=True
            ):
                assert mine == pytest.approx(theirs, abs=1e-10)
            assert remembered["met"].tolist() == wanted["met"]


def assert_stacks_agree(
    experiment: BuiltExperiment, states: list[RunState], stack: int = 4
) -> None:
    stacked, _ = play_states(experiment, VectorizedEngine(experiment.task, stack))
    for mine, wanted in zip(stacked, states, strict=True):
        place, distance = max_rel_diff(state_tree(mine), state_tree(wanted))
        assert distance <= 1e-12, f"round {wanted.round}: {distance:.1e} at {place}"


def assert_moved(history: list[dict[str, Any]]) -> None:
    for client in range(CLIENTS):
        assert gap_of(history[-1]["models"][client], history[0]["models"][client]) > 0.01, (
            "a model that hardly moved proves nothing"
        )
