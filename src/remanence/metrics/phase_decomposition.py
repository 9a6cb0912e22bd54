"""Where it was lost: the change of accuracy in a round, split exactly over the phases of the round.

Accuracy per class is known between any two phases, so the losses of the phases add up to the loss
of the round, class by class. With a server: drift (the test set as it was -> as it is), local (the
model as received -> the mean of the clients' models, by aggregation weight), aggregation (that mean
-> the merged model), server (-> the model after the server's own training). Without a server:
mixing with peers, then local training, averaged over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remanence.metrics.accuracy_tables import (
    LocalModels,
    accuracies_by_model,
    is_decentralized,
    local_models,
    nan_mean,
    on_rows_of,
    select_whole,
)
from remanence.results.ledger import GLOBAL, Ledger

# in the order of a round; a run has some of them
PHASES = ("drift", "mixing", "local", "aggregation", "server")


class ClientLosses(NamedTuple):
    """What each client's local training lost on average over the rounds in which it was
    recorded; negative = gained.
    """

    clients: np.ndarray  # [n] ascending
    loss: np.ndarray  # [n, C]


@dataclass(frozen=True)
class PhaseDecomposition:
    """Losses of accuracy by phase: positive = lost, negative = gained. The parts add up to the
    change.
    """

    round: np.ndarray  # [T] rounds whose local models were recorded
    # phase -> [T, C], in the order of a round; 0 where a phase did not take place
    parts: dict[str, np.ndarray]
    change: np.ndarray  # [T, C] accuracy at the start of the round minus at its end
    clients: ClientLosses  # whose local training lost

    def phase_means(self) -> dict[str, float]:
        """The mean loss a round, over rounds and classes, of each phase."""
        return {phase: float(nan_mean(part)) for phase, part in self.parts.items()}


def phase_decomposition(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> PhaseDecomposition:
    """Which phase lost how much of which class, for every round with local records.

    A round that begins at 0.75 on a class, whose clients (weights 0.5) end at 0.75 and 0.25, and
    whose merged model has 0.25:

    >>> from remanence.results.ledger import make_record
    >>> def judged(right, **columns):
    ...     return make_record(1, np.array([[right]]), round=1, split="test", owner=-1, **columns)
    >>> rows = [judged(3, moment="before", model=-1), judged(3, moment="local", model=0, weight=0.5),
    ...         judged(1, moment="local", model=1, weight=0.5), judged(1, moment="merged", model=-1)]
    >>> for row in rows:
    ...     row["total"] = 4
    >>> lost = phase_decomposition(Ledger(np.concatenate(rows), ["cat"]))
    >>> {phase: float(part[0, 0]) for phase, part in lost.parts.items()}, float(lost.change[0, 0])
    ({'local': 0.25, 'aggregation': 0.25}, 0.5)

    shares: the concepts' shares of the clients [T, M] (`concept_shares`), needed where a model was
    judged on several concepts. Before a drift the shares are those of the time step before. On
    other splits than the test set the merged model must have been judged on the same clients' rows.
    """
    losses = local_losses_by_client(ledger, split, shares)
    levels = (
        _levels_of_peers(ledger, split, shares)
        if is_decentralized(ledger)
        else _levels_of_server(ledger, split, shares)
    )
    rounds, classes = levels.rounds, len(ledger.class_names)
    if not len(rounds):
        return PhaseDecomposition(rounds, {}, np.zeros((0, classes)), losses)
    parts = {
        phase: levels.between[place] - levels.between[place + 1]
        for place, phase in enumerate(levels.phases)
    }
    return PhaseDecomposition(rounds, parts, levels.between[0] - levels.between[-1], losses)


def local_losses_by_client(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> ClientLosses:
    """Whose training forgets: accuracy per class of what the client received minus that of its
    trained model, averaged over its recorded rounds.
    """
    local = local_models(ledger, split, shares)
    clients = np.unique(local.client)
    lost = local.start - local.end
    return ClientLosses(
        clients,
        np.array([nan_mean(lost[local.client == client], axis=0) for client in clients]).reshape(
            len(clients), lost.shape[1]
        ),
    )


class _Levels(NamedTuple):
    """Accuracy between the phases of every round."""

    rounds: np.ndarray  # [T]
    phases: list[str]
    between: list[np.ndarray]  # one more than phases, each [T, C]


def _levels_of_server(ledger: Ledger, split: str, shares: np.ndarray | None) -> _Levels:
    curves = {
        moment: _level(_step_back(ledger, split, shares, moment), shares)
        for moment in ("before_drift", "before", "merged", "refined")
    }
    local = _mean_of_clients(local_models(ledger, split, shares))
    rounds = np.array(
        sorted(curves["before"].keys() & local.keys() & curves["merged"].keys()), dtype=np.int64
    )
    phases, between = ["local", "aggregation"], [curves["before"], local, curves["merged"]]
    if any(int(round) in curves["before_drift"] for round in rounds):
        phases, between = ["drift", *phases], [curves["before"] | curves["before_drift"], *between]
    if any(int(round) in curves["refined"] for round in rounds):
        phases, between = [*phases, "server"], [*between, curves["merged"] | curves["refined"]]
    return _Levels(rounds, phases, _stack(rounds, between))


def _levels_of_peers(ledger: Ledger, split: str, shares: np.ndarray | None) -> _Levels:
    """Only clients recorded before mixing, after it and after training count, so that every
    level is about the same clients.
    """
    chosen = [
        select_whole(ledger, moment, split, shares) for moment in ("before", "merged", "local")
    ]
    models = [
        set(zip(records["round"].tolist(), records["model"].tolist(), strict=True))
        for records in chosen
    ]
    whole = models[0] & models[1] & models[2]
    between = []
    for records in chosen:
        keep = [
            pair in whole
            for pair in zip(records["round"].tolist(), records["model"].tolist(), strict=True)
        ]
        between.append(_level(records[np.array(keep, dtype=bool)], shares))
    rounds = np.array(sorted({round for round, _ in whole}), dtype=np.int64)
    return _Levels(rounds, ["mixing", "local"], _stack(rounds, between))


def _step_back(ledger: Ledger, split: str, shares: np.ndarray | None, moment: str) -> np.ndarray:
    """The global model's records at a moment; those from before a drift get the time step whose
    shares they are weighted by.
    """
    records = select_whole(ledger, moment, split, shares)
    records = np.asarray(records[records["model"] == GLOBAL])
    if split != "test":
        records = records[on_rows_of(records, ledger.select(moment="local", split=split))]
    if moment == "before_drift":
        steps = {
            int(row["round"]): int(row["time_step"])
            for row in ledger.select(moment="before", split=split)
        }
        records = records.copy()
        records["time_step"] = [
            max(0, steps.get(int(row["round"]), int(row["time_step"])) - 1) for row in records
        ]
    return records


def _level(records: np.ndarray, shares: np.ndarray | None) -> dict[int, np.ndarray]:
    """Mean over models of the accuracy per class, by round."""
    found = accuracies_by_model(records, shares)
    return {
        int(round): nan_mean(found.per_class[found.round == round], axis=0)
        for round in np.unique(found.round)
    }


def _mean_of_clients(local: LocalModels) -> dict[int, np.ndarray]:
    """Mean of the clients' accuracy per class by aggregation weight; all count the same where
    no weight is known.
    """
    means = {}
    for round in np.unique(local.round):
        here = local.round == round
        weight = local.weight[here] if local.weight[here].sum() > 0 else np.ones(here.sum())
        means[int(round)] = (weight[:, None] * local.end[here]).sum(axis=0) / weight.sum()
    return means


def _stack(rounds: np.ndarray, levels: list[dict[int, np.ndarray]]) -> list[np.ndarray]:
    return [np.array([level[int(round)] for round in rounds]) for level in levels]
