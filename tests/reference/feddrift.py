"""FedDrift reimplemented (Jothimurugesan et al. 2023; the HAST thesis, section 2.6.2), model by model
and client by client, in plain PyTorch.

The package is not used here. Batches, examples and cohorts are arguments; `play` returns every
decision and every round in plain dicts and lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference.gossip import (
    Loss,
    Rows,
    State,
    Training,
    clone,
    cross_entropy,
    mean_error,
    mean_loss,
    mix,
    train,
)
from torch import nn

Distances = Mapping[tuple[int, int], float]  # by pair of models, the smaller number first


@dataclass(frozen=True)
class Scenario:
    """The inputs of a run: rounds count from 1 over all time steps, time steps from 0."""

    net: nn.Module  # with the weights of model 0
    clients: int
    steps: int  # time steps
    rounds: int  # a time step
    # (round, client, phase), where the phase is always 0
    batches: Callable[[int, int, int], Sequence[Rows]]
    train: Callable[[int, int], Rows]  # (time step, client)
    training: Training
    # (time step, client): the training loss
    loss: Callable[[int, int], Loss] = lambda step, client: cross_entropy
    # the clients that train in a round; None: all
    cohort: Callable[[int], Sequence[int]] | None = None


@dataclass(frozen=True)
class Method:
    delta: float
    measure: str = "loss"  # loss | accuracy, which stands for 1 - accuracy


@dataclass
class RunState:
    models: dict[int, State]  # by number; numbers are not reused
    assigned: list[int]  # each client's model
    last: list[float]  # each client's loss at its last decision
    next_number: int


def measure_of(scenario: Scenario, method: Method, state: State, rows: Rows) -> float:
    return (
        mean_loss(scenario.net, state, rows)
        if method.measure == "loss"
        else mean_error(scenario.net, state, rows)
    )


def detect(
    losses: Sequence[Mapping[int, float]], last: Sequence[float], delta: float, next_number: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """losses: of every model, by client -> each client's best model, its new model, and the clients
    that started a new model.

    A client whose best loss is worse than its last by more than delta starts a new model.
    """
    best, assigned, alone = [], [], {}
    for k, of_models in enumerate(losses):
        lowest = min(of_models, key=lambda number: (of_models[number], number))
        best.append(lowest)
        if of_models[lowest] > last[k] + delta:
            alone[k] = next_number
            next_number += 1
        assigned.append(alone.get(k, lowest))
    return best, assigned, alone


def distances_between(loss_on: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """loss_on[i, j]: of model i on the data of model j -> the larger of the two increases
    in loss on the other's data, at least 0
    """
    numbers = sorted({i for i, _ in loss_on})
    distances = {}
    for i in numbers:
        for j in numbers:
            if i < j:
                distances[i, j] = max(
                    loss_on[j, i] - loss_on[i, i], loss_on[i, j] - loss_on[j, j], 0.0
                )
    return distances


def link(numbers: Sequence[int], distances: Distances, delta: float) -> list[list[int]]:
    """Complete linkage: the two groups whose FARTHEST members are closest become one, as long
    as these are closer than delta.
    """
    groups = [[number] for number in sorted(numbers)]
    while True:
        closest = delta
        pair = None
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                farthest = max(
                    distances[min(i, j), max(i, j)] for i in groups[a] for j in groups[b]
                )
                if farthest < closest:
                    closest, pair = farthest, (a, b)
        if pair is None:
            return groups
        groups[pair[0]] = sorted(groups[pair[0]] + groups.pop(pair[1]))


def decide(scenario: Scenario, method: Method, run: RunState, step: int) -> dict[str, Any]:
    """The start of a time step with new data: every client takes its best model or starts a new one;
    then models are merged.
    """
    rows = [scenario.train(step, k) for k in range(scenario.clients)]
    sizes = [len(y) for _, y in rows]
    losses = [
        {number: measure_of(scenario, method, state, mine) for number, state in run.models.items()}
        for mine in rows
    ]
    before = {number: clone(state) for number, state in run.models.items()}
    best, run.assigned, alone = detect(losses, run.last, method.delta, run.next_number)
    run.next_number += len(alone)
    run.last = [losses[k][best[k]] for k in range(scenario.clients)]
    for k, number in alone.items():
        run.models[number] = clone(before[best[k]])

    # of the models that can be merged: those with clients, without those that are new
    members: dict[int, list[int]] = {}
    for k, number in enumerate(run.assigned):
        if k not in alone:
            members.setdefault(number, []).append(k)
    loss_on = {}
    for j, clients in members.items():
        together = (
            torch.cat([rows[k][0] for k in clients]),
            torch.cat([rows[k][1] for k in clients]),
        )
        for i in members:
            loss_on[i, j] = measure_of(scenario, method, run.models[i], together)
    distances = distances_between(loss_on)
    groups = link(list(members), distances, method.delta)
    weights = {number: sum(sizes[k] for k in clients) for number, clients in members.items()}
    for group in groups:
        kept, others = group[0], group[1:]
        merged = mix(
            run.models[kept],
            [run.models[i] for i in others],
            weights[kept],
            [weights[i] for i in others],
        )
        run.models[kept] = merged
        for number in others:
            del run.models[number]
            for k in members[number]:
                run.assigned[k] = kept
    happened = {
        "step": step,
        "losses": losses,
        "best": best,
        "alone": alone,
        "distances": distances,
        "groups": groups,
    }
    return happened | snapshot(run)


def snapshot(run: RunState) -> dict[str, Any]:
    models = {number: clone(state) for number, state in run.models.items()}
    return {"models": models, "assigned": list(run.assigned), "last": list(run.last)}


def play_round(scenario: Scenario, run: RunState, round: int) -> dict[str, Any]:
    """FedAvg among the clients of each model; a model without participants does not change."""
    step = (round - 1) // scenario.rounds
    cohort = sorted(range(scenario.clients) if scenario.cohort is None else scenario.cohort(round))
    trained = {}
    for k in cohort:
        state = run.models[run.assigned[k]]
        trained[k] = train(
            scenario.net,
            state,
            scenario.batches(round, k, 0),
            scenario.training,
            round,
            loss=scenario.loss(step, k),
        )
    for number in list(run.models):
        present = [k for k in cohort if run.assigned[k] == number]
        sizes = [len(scenario.train(step, k)[1]) for k in present]
        if present:
            replies = [trained[k] for k in present]
            run.models[number] = mix(replies[0], replies[1:], sizes[0], sizes[1:])
    return {"round": round, "step": step, "cohort": cohort, "trained": trained} | snapshot(run)


def play(scenario: Scenario, method: Method) -> dict[str, list[dict[str, Any]]]:
    """-> "decisions": one entry for every time step except the first, "rounds": one entry a round"""
    run = RunState(
        {0: clone(scenario.net.state_dict())},
        [0] * scenario.clients,
        [math.inf] * scenario.clients,
        1,
    )
    decisions, rounds = [], []
    for round in range(1, scenario.steps * scenario.rounds + 1):
        step, within = divmod(round - 1, scenario.rounds)
        if step > 0 and within == 0:
            decisions.append(decide(scenario, method, run, step))
        rounds.append(play_round(scenario, run, round))
    return {"decisions": decisions, "rounds": rounds}
