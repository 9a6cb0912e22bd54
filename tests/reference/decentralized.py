"""Random, DAC, HAST, Oracle and Local once more (HAST thesis, section 3.3, and its authors'
settings), client by client, in plain PyTorch.

Nothing of the program is used here. Batches, rows and draws are handed in; `play` returns
everything that happened, round by round, in plain dicts and lists.
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
class World:
    """What happens to the clients: rounds count from 1 over all time steps, time steps from 0."""

    net: nn.Module  # with the weights that all start from
    clients: int
    steps: int  # time steps
    rounds: int  # a time step
    # (round, client, phase); the training before round 1 is round 0
    batches: Callable[[int, int, int | str], Sequence[Rows]]
    train: Callable[[int, int], Rows]  # (time step, client)
    valid: Callable[[int, int], Rows]
    # (round, client, candidates, count)
    choose_uniform: Callable[[int, int, list[int], int], Sequence[int]]
    # ..., candidates, their chances, count
    choose_weighted: Callable[[int, int, list[int], list[float], int], Sequence[int]]
    training: Training
    # (time step, client): what training descends on
    loss: Callable[[int, int], Loss] = lambda step, client: cross_entropy
    # all others, unless a graph says otherwise
    neighbors: Callable[[int], Sequence[int]] | None = None
    # who is there in a round; everybody, unless it says otherwise
    online: Callable[[int], Sequence[int]] | None = None
    cluster: Callable[[int, int], int] | None = None  # (time step, client), for the oracle

    def size(self, step: int, client: int) -> int:
        return len(self.train(step, client)[1])

    def candidates(self, round: int, client: int) -> list[int]:
        """Whom a client may ask in this round; a stopped one still answers."""
        there = range(self.clients) if self.online is None else self.online(round)
        known = range(self.clients) if self.neighbors is None else self.neighbors(client)
        return [j for j in range(self.clients) if j in there and j in known and j != client]


@dataclass(frozen=True)
class Method:
    name: str  # random | dac | hast | oracle | local
    peers: int = 3
    tau: float = 30.0
    published_tau: bool = False  # dac: the temperature climbs within a time step
    depth: int = 3  # hast: layers of the classifier
    fresh: bool = (
        # hast: the second choice goes by this round's similarities (algorithm 4) instead of the
        # last round's (the authors' code)
        False
    )
    patience: int | None = None  # rounds without gain after which a client stops; None: never
    # the model before round 1 is a candidate for the best one, as in the authors' code
    judge_warmup: bool = True


@dataclass
class Memory:
    """What lasts from round to round."""

    models: list[State]
    similarities: list[list[float]]  # [K][K]
    met: list[list[bool]]  # [K][K]
    best_models: list[State]
    best_loss: list[float]
    waited: list[int]  # rounds without gain
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


def start(world: World, method: Method) -> Memory:
    """Common weights, then one local phase of everybody alone."""
    models = []
    best_loss = []
    for k in range(world.clients):
        batches = world.batches(0, k, WARMUP)
        model = train(
            world.net,
            clone(world.net.state_dict()),
            batches,
            world.training,
            0,
            loss=world.loss(0, k),
        )
        models.append(model)
        best_loss.append(
            mean_loss(world.net, model, world.valid(0, k)) if method.judge_warmup else math.inf
        )
    strangers = [[False] * world.clients for _ in range(world.clients)]
    nobody = [False] * world.clients
    best = [clone(model) for model in models]
    return Memory(
        models,
        first_similarities(world.clients),
        strangers,
        best,
        best_loss,
        [0] * world.clients,
        nobody,
    )


def begin_time_step(world: World, memory: Memory, step: int) -> None:
    """New data: models, similarities and acquaintances stay, what was best is judged again, and
    everybody trains again.
    """
    for k in range(world.clients):
        memory.best_loss[k] = mean_loss(world.net, memory.best_models[k], world.valid(step, k))
        memory.waited[k] = 0
        memory.stopped[k] = False


def meet(world: World, method: Method, memory: Memory, round: int, k: int) -> dict[str, Any]:
    """One client's choices and mixes, from what stood at the end of the previous round. -> what
    is new about this client
    """
    step, within = divmod(round - 1, world.rounds)
    candidates = world.candidates(round, k)
    if method.name == "oracle":
        assert world.cluster is not None, "the oracle must be told the clusters"
        candidates = [j for j in candidates if world.cluster(step, j) == world.cluster(step, k)]
    count = min(method.peers, len(candidates))
    tau = temperature(method.tau, within, method.published_tau and method.name == "dac")
    happened: dict[str, Any] = {
        "similarities": list(memory.similarities[k]),
        "met": list(memory.met[k]),
    }
    happened |= {"chosen": [], "chosen_similar": [], "chances": [], "probes": {}}

    def mix_with(model: State, peers: Sequence[int], names: Sequence[str] | None = None) -> State:
        theirs = [memory.models[j] for j in peers]
        return mix(model, theirs, world.size(step, k), [world.size(step, j) for j in peers], names)

    if method.name == "dac" and count:
        happened["chances"] = chances(memory.similarities[k], candidates, tau)
        happened["chosen"] = list(
            world.choose_weighted(round, k, candidates, happened["chances"], count)
        )
    elif method.name != "local" and count:
        happened["chosen"] = list(world.choose_uniform(round, k, candidates, count))

    if method.name in ("dac", "hast"):
        for j in happened["chosen"]:
            happened["probes"][j] = mean_loss(world.net, memory.models[j], world.train(step, k))
        happened["similarities"], happened["met"] = update_similarities(
            k, happened["probes"], memory.similarities, memory.met[k]
        )
    happened["mixed_1"] = mix_with(memory.models[k], happened["chosen"])

    happened["mixed_2"] = clone(happened["mixed_1"])
    if method.name == "hast" and method.depth and count:
        likeness = happened["similarities"] if method.fresh else memory.similarities[k]
        happened["chances"] = chances(likeness, candidates, tau)
        happened["chosen_similar"] = list(
            world.choose_weighted(round, k, candidates, happened["chances"], count)
        )
        for j in happened["chosen_similar"]:
            happened["met"][j] = True
        happened["mixed_2"] = mix_with(
            happened["mixed_1"],
            happened["chosen_similar"],
            names_of_last_layers(world.net, method.depth),
        )
    return happened


def learn(world: World, method: Method, round: int, k: int, model: State) -> dict[str, Any]:
    """One client's training, and what it leaves: trained, tuned (before it is judged), whether
    that was kept, the model, its validation loss.
    """
    step = (round - 1) // world.rounds
    valid, loss = world.valid(step, k), world.loss(step, k)
    trained = train(
        world.net, model, world.batches(round, k, WHOLE), world.training, round, loss=loss
    )
    trained_loss = mean_loss(world.net, trained, valid)
    if method.name != "hast" or method.depth == 0:
        return {
            "trained": trained,
            "tuned": clone(trained),
            "kept": False,
            "model": trained,
            "valid_loss": trained_loss,
        }
    classifier = names_of_last_layers(world.net, method.depth)
    tuned = train(
        world.net, trained, world.batches(round, k, FINE), world.training, round, classifier, loss
    )
    tuned_loss = mean_loss(world.net, tuned, valid)
    kept = tuned_loss < trained_loss
    model, final_loss = (tuned, tuned_loss) if kept else (trained, trained_loss)
    return {
        "trained": trained,
        "tuned": tuned,
        "kept": kept,
        "model": clone(model),
        "valid_loss": final_loss,
    }


def judge(best: float, waited: int, loss: float, patience: int | None) -> tuple[bool, int, bool]:
    """-> is this the best so far, rounds without gain, does the client stop"""
    if loss < best:
        return True, 0, False
    waited += 1
    return False, waited, patience is not None and waited > patience


def play_round(world: World, method: Method, memory: Memory, round: int) -> dict[str, Any]:
    there = range(world.clients) if world.online is None else world.online(round)
    active = [k for k in range(world.clients) if k in there and not memory.stopped[k]]
    record: dict[str, Any] = {
        "round": round,
        "step": (round - 1) // world.rounds,
        "active": active,
        "best_loss_before": list(memory.best_loss),
    }
    for what in ("mixed_1", "mixed_2", "trained", "tuned"):
        record[what] = [clone(state) for state in memory.models]  # who takes no part stays as it is
    for what in ("chosen", "chosen_similar", "chances", "probes", "kept", "valid_loss"):
        record[what] = {}  # by client, for those who take part

    # all of them, before anybody changes
    meetings = {k: meet(world, method, memory, round, k) for k in active}
    for k, happened in meetings.items():
        for what in ("mixed_1", "mixed_2", "chosen", "chosen_similar", "chances", "probes"):
            record[what][k] = happened[what]
        memory.similarities[k], memory.met[k] = happened["similarities"], happened["met"]

        learnt = learn(world, method, round, k, happened["mixed_2"])
        for what in ("trained", "tuned", "kept", "valid_loss"):
            record[what][k] = learnt[what]
        memory.models[k] = learnt["model"]
        better, memory.waited[k], memory.stopped[k] = judge(
            memory.best_loss[k], memory.waited[k], learnt["valid_loss"], method.patience
        )
        if better:
            memory.best_models[k], memory.best_loss[k] = (
                clone(learnt["model"]),
                learnt["valid_loss"],
            )
    return record | memory.snapshot()


def play(world: World, method: Method) -> list[dict[str, Any]]:
    """-> the state after the warm-up, as entry 0, then one entry a round"""
    memory = start(world, method)
    history = [{"round": 0, "step": 0} | memory.snapshot()]
    for round in range(1, world.steps * world.rounds + 1):
        step, within = divmod(round - 1, world.rounds)
        if step > 0 and within == 0:
            begin_time_step(world, memory, step)
        history.append(play_round(world, method, memory, round))
    return history
