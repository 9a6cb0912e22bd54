"""Random, DAC, HAST, Oracle and Local reimplemented (HAST thesis, section 3.3, and its authors'
settings), client by client, in plain PyTorch.

The package is not used here. Batches, examples and draws are arguments; `play` returns the results
of every round in plain dicts and lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reference.dac import chances, first_similarities, temperature, update_similarities
from reference.gossip import (
    Loss,
    Rows,
    State,
    Training,
    clone,
    cross_entropy,
    mean_loss,
    mix,
    names_of_last_layers,
    train,
)
from torch import nn

WHOLE, FINE, WARMUP = 0, 1, "warmup"  # the phases of local training


@dataclass(frozen=True)
class Scenario:
    """The inputs of a run: rounds count from 1 over all time steps, time steps from 0."""

    net: nn.Module  # with the initial weights of all clients
    clients: int
    steps: int  # time steps
    rounds: int  # of each time step
    # (round, client, phase); the training before round 1 is round 0
    batches: Callable[[int, int, int | str], Sequence[Rows]]
    train: Callable[[int, int], Rows]  # (time step, client)
    valid: Callable[[int, int], Rows]
    # (round, client, candidates, count)
    choose_uniform: Callable[[int, int, list[int], int], Sequence[int]]
    # ..., candidates, their chances, count
    choose_weighted: Callable[[int, int, list[int], list[float], int], Sequence[int]]
    training: Training
    # (time step, client): the training loss
    loss: Callable[[int, int], Loss] = lambda step, client: cross_entropy
    # the peers a client can reach; None: all others
    neighbors: Callable[[int], Sequence[int]] | None = None
    # the clients that are online in a round; None: all
    online: Callable[[int], Sequence[int]] | None = None
    cluster: Callable[[int, int], int] | None = None  # (time step, client), for the oracle

    def size(self, step: int, client: int) -> int:
        return len(self.train(step, client)[1])

    def candidates(self, round: int, client: int) -> list[int]:
        """The peers a client can select in this round; a stopped peer still answers."""
        there = range(self.clients) if self.online is None else self.online(round)
        known = range(self.clients) if self.neighbors is None else self.neighbors(client)
        return [j for j in range(self.clients) if j in there and j in known and j != client]


@dataclass(frozen=True)
class Method:
    name: str  # random | dac | hast | oracle | local
    peers: int = 3
    tau: float = 30.0
    published_tau: bool = False  # dac: the temperature grows within a time step
    # dac: what the other probed peers say of a peer replaces its first measurement
    hearsay_wins: bool = False
    depth: int = 3  # hast: layers of the classifier
    fresh: bool = (
        # hast: the second selection uses the similarities of this round (algorithm 4) instead of
        # those of the last round (the authors' code)
        False
    )
    patience: int | None = (
        None  # rounds without improvement after which a client stops; None: never
    )
    # the model before round 1 is a candidate for the best one, as in the authors' code
    evaluate_warmup: bool = True


@dataclass
class RunState:
    """The state between rounds."""

    models: list[State]
    similarities: list[list[float]]  # [K][K]
    met: list[list[bool]]  # [K][K]
    best_models: list[State]
    best_loss: list[float]
    waited: list[int]  # rounds without improvement
    stopped: list[bool]

    def snapshot(self) -> dict[str, Any]:
        return {
            "models": [clone(state) for state in self.models],
            "similarities": [list(row) for row in self.similarities],
            "met": [list(row) for row in self.met],
            "best_models": [clone(state) for state in self.best_models],
            "best_loss": list(self.best_loss),
            "patience": list(self.waited),
            "stopped": list(self.stopped),
        }


def start(scenario: Scenario, method: Method) -> RunState:
    """Common weights, then one local phase of every client without exchange."""
    models = []
    best_loss = []
    for k in range(scenario.clients):
        batches = scenario.batches(0, k, WARMUP)
        model = train(
            scenario.net,
            clone(scenario.net.state_dict()),
            batches,
            scenario.training,
            0,
            loss=scenario.loss(0, k),
        )
        models.append(model)
        best_loss.append(
            mean_loss(scenario.net, model, scenario.valid(0, k))
            if method.evaluate_warmup
            else math.inf
        )
    met = [[False] * scenario.clients for _ in range(scenario.clients)]
    stopped = [False] * scenario.clients
    best = [clone(model) for model in models]
    return RunState(
        models,
        first_similarities(scenario.clients),
        met,
        best,
        best_loss,
        [0] * scenario.clients,
        stopped,
    )


def begin_time_step(scenario: Scenario, run: RunState, step: int) -> None:
    """New data: models, similarities and met peers stay, the best models are evaluated again, and
    all clients train again.
    """
    for k in range(scenario.clients):
        run.best_loss[k] = mean_loss(scenario.net, run.best_models[k], scenario.valid(step, k))
        run.waited[k] = 0
        run.stopped[k] = False


def exchange(
    scenario: Scenario, method: Method, run: RunState, round: int, k: int
) -> dict[str, Any]:
    """Select the peers of one client and average its model with theirs, from the state at the end of
    the previous round. Returns the new values of this client.
    """
    step, within = divmod(round - 1, scenario.rounds)
    candidates = scenario.candidates(round, k)
    if method.name == "oracle":
        assert scenario.cluster is not None, "the oracle needs the clusters"
        candidates = [
            j for j in candidates if scenario.cluster(step, j) == scenario.cluster(step, k)
        ]
    count = min(method.peers, len(candidates))
    tau = temperature(method.tau, within, method.published_tau and method.name == "dac")
    result: dict[str, Any] = {
        "similarities": list(run.similarities[k]),
        "met": list(run.met[k]),
    }
    result |= {"chosen": [], "chosen_similar": [], "chances": [], "probes": {}}

    def mix_with(model: State, peers: Sequence[int], names: Sequence[str] | None = None) -> State:
        theirs = [run.models[j] for j in peers]
        return mix(
            model, theirs, scenario.size(step, k), [scenario.size(step, j) for j in peers], names
        )

    if method.name == "dac" and count:
        result["chances"] = chances(run.similarities[k], candidates, tau)
        result["chosen"] = list(
            scenario.choose_weighted(round, k, candidates, result["chances"], count)
        )
    elif method.name != "local" and count:
        result["chosen"] = list(scenario.choose_uniform(round, k, candidates, count))

    if method.name in ("dac", "hast"):
        for j in result["chosen"]:
            result["probes"][j] = mean_loss(scenario.net, run.models[j], scenario.train(step, k))
        result["similarities"], result["met"] = update_similarities(
            k, result["probes"], run.similarities, run.met[k], method.hearsay_wins
        )
    result["mixed_1"] = mix_with(run.models[k], result["chosen"])

    result["mixed_2"] = clone(result["mixed_1"])
    if method.name == "hast" and method.depth and count:
        similarities = result["similarities"] if method.fresh else run.similarities[k]
        result["chances"] = chances(similarities, candidates, tau)
        result["chosen_similar"] = list(
            scenario.choose_weighted(round, k, candidates, result["chances"], count)
        )
        for j in result["chosen_similar"]:
            result["met"][j] = True
        result["mixed_2"] = mix_with(
            result["mixed_1"],
            result["chosen_similar"],
            names_of_last_layers(scenario.net, method.depth),
        )
    return result


def learn(scenario: Scenario, method: Method, round: int, k: int, model: State) -> dict[str, Any]:
    """Train one client. Returns the trained model, the tuned model, whether the tuned model was kept,
    the final model and its validation loss.
    """
    step = (round - 1) // scenario.rounds
    valid, loss = scenario.valid(step, k), scenario.loss(step, k)
    trained = train(
        scenario.net, model, scenario.batches(round, k, WHOLE), scenario.training, round, loss=loss
    )
    trained_loss = mean_loss(scenario.net, trained, valid)
    if method.name != "hast" or method.depth == 0:
        return {
            "trained": trained,
            "tuned": clone(trained),
            "kept": False,
            "model": trained,
            "valid_loss": trained_loss,
        }
    classifier = names_of_last_layers(scenario.net, method.depth)
    tuned = train(
        scenario.net,
        trained,
        scenario.batches(round, k, FINE),
        scenario.training,
        round,
        classifier,
        loss,
    )
    tuned_loss = mean_loss(scenario.net, tuned, valid)
    kept = tuned_loss < trained_loss
    model, final_loss = (tuned, tuned_loss) if kept else (trained, trained_loss)
    return {
        "trained": trained,
        "tuned": tuned,
        "kept": kept,
        "model": clone(model),
        "valid_loss": final_loss,
    }


def update_early_stopping(
    best: float, waited: int, loss: float, patience: int | None
) -> tuple[bool, int, bool]:
    """Return whether this loss is the best, the rounds without improvement, and whether the client
    stops.
    """
    if loss < best:
        return True, 0, False
    waited += 1
    return False, waited, patience is not None and waited > patience


def play_round(scenario: Scenario, method: Method, run: RunState, round: int) -> dict[str, Any]:
    there = range(scenario.clients) if scenario.online is None else scenario.online(round)
    active = [k for k in range(scenario.clients) if k in there and not run.stopped[k]]
    record: dict[str, Any] = {
        "round": round,
        "step": (round - 1) // scenario.rounds,
        "active": active,
        "best_loss_before": list(run.best_loss),
    }
    for what in ("mixed_1", "mixed_2", "trained", "tuned"):
        record[what] = [
            clone(state) for state in run.models
        ]  # clients that do not take part keep their model
    for what in ("chosen", "chosen_similar", "chances", "probes", "kept", "valid_loss"):
        record[what] = {}  # by client, for those that take part

    # all selections, before any model changes
    selections = {k: exchange(scenario, method, run, round, k) for k in active}
    for k, result in selections.items():
        for what in ("mixed_1", "mixed_2", "chosen", "chosen_similar", "chances", "probes"):
            record[what][k] = result[what]
        run.similarities[k], run.met[k] = result["similarities"], result["met"]

        outcome = learn(scenario, method, round, k, result["mixed_2"])
        for what in ("trained", "tuned", "kept", "valid_loss"):
            record[what][k] = outcome[what]
        run.models[k] = outcome["model"]
        better, run.waited[k], run.stopped[k] = update_early_stopping(
            run.best_loss[k], run.waited[k], outcome["valid_loss"], method.patience
        )
        if better:
            run.best_models[k], run.best_loss[k] = (
                clone(outcome["model"]),
                outcome["valid_loss"],
            )
    return record | run.snapshot()


def play(scenario: Scenario, method: Method) -> list[dict[str, Any]]:
    """Return the state after the warm-up as entry 0, then one entry for each round."""
    run = start(scenario, method)
    history = [{"round": 0, "step": 0} | run.snapshot()]
    for round in range(1, scenario.steps * scenario.rounds + 1):
        step, within = divmod(round - 1, scenario.rounds)
        if step > 0 and within == 0:
            begin_time_step(scenario, run, step)
        history.append(play_round(scenario, method, run, round))
    return history
