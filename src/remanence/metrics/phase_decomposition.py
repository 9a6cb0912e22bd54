"""The change of accuracy in a round, split over the phases of the round.

The accuracy by class is known between any two phases, so the losses of the phases sum to the loss
of the round. The phases with a server, and the accuracies before and after each:

- drift: of the global model on the data of the previous and of the new time step
- local: of the received model; of the clients' models, as a mean by aggregation weight
- aggregation: that mean; of the aggregated model
- server: of the aggregated model; of the model after the server's training

Without a server: mixing with peers, then local training, both as means over clients.
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
    on_examples_of,
    select_whole,
)
from remanence.results.ledger import GLOBAL, Ledger

# in the order of a round; a run has some of them
PHASES = ("drift", "mixing", "local", "aggregation", "server")


class ClientLosses(NamedTuple):
    """The loss of each client's local training, mean over its recorded rounds. Negative: gained."""

    clients: np.ndarray  # [n] ascending
    loss: np.ndarray  # [n, C]


@dataclass(frozen=True)
class PhaseDecomposition:
    """Losses of accuracy by phase (negative: gained). The parts sum to the change."""

    round: np.ndarray  # [T] rounds whose local models were recorded
    # phase -> [T, C], in the order of a round; 0 in rounds without that phase
    parts: dict[str, np.ndarray]
    change: np.ndarray  # [T, C] accuracy at the start of the round minus at its end
    clients: ClientLosses  # of local training

    def phase_means(self) -> dict[str, float]:
        """The loss of each phase, mean over rounds and classes."""
        return {phase: float(nan_mean(part)) for phase, part in self.parts.items()}


def phase_decomposition(
    ledger: Ledger, split: str = "test", shares: np.ndarray | None = None
) -> PhaseDecomposition:
    """Split the loss of each class over the phases, for every round with recorded local models.

    Args:
        ledger: The ledger.
        split: The split. On other splits than the test set, the aggregated model must have been
            evaluated on the same clients' examples as the local models.
        shares: The share of the clients in each concept [T, M], as `concept_shares` returns it.
            Required if models were evaluated on several concepts. Before a drift, the shares are
            those of the previous time step.

    A round that starts at 0.75 on a class. Its clients (weights 0.5) end at 0.75 and 0.25, and the
    aggregated model has 0.25:

    >>> from remanence.results.ledger import make_record
    >>> def evaluated(right, **columns):
    ...     columns |= {"round": 1, "split": "test", "owner": -1}
    ...     record = make_record(1, np.array([[right]]), **columns)
    ...     record["total"] = 4
    ...     return record
    >>> records = [evaluated(3, moment="before", model=-1)]
    >>> records += [evaluated(3, moment="local", model=0, weight=0.5)]
    >>> records += [evaluated(1, moment="local", model=1, weight=0.5)]
    >>> records += [evaluated(1, moment="merged", model=-1)]
    >>> lost = phase_decomposition(Ledger(np.concatenate(records), ["cat"]))
    >>> {phase: float(part[0, 0]) for phase, part in lost.parts.items()}, float(lost.change[0, 0])
    ({'local': 0.25, 'aggregation': 0.25}, 0.5)
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
    """Accuracy by class of the model that a client received minus that of its trained model, mean
    over its recorded rounds.
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
    """Accuracies before, between and after the phases of every round."""

    rounds: np.ndarray  # [T]
    phases: list[str]
    between: list[np.ndarray]  # one more than phases, each [T, C]


def _levels_of_server(ledger: Ledger, split: str, shares: np.ndarray | None) -> _Levels:
    curves = {
        moment: _level(_global_records(ledger, split, shares, moment), shares)
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
    """Only clients that were recorded before mixing, after it and after training are used, so that
    all levels are of the same clients.
    """
    chosen = [
        select_whole(ledger, moment, split, shares) for moment in ("before", "merged", "local")
    ]
    models = [
        set(zip(records["round"].tolist(), records["model"].tolist(), strict=True))
        for records in chosen
    ]
    complete = models[0] & models[1] & models[2]
    between = []
    for records in chosen:
        keep = [
            pair in complete
            for pair in zip(records["round"].tolist(), records["model"].tolist(), strict=True)
        ]
        between.append(_level(records[np.array(keep, dtype=bool)], shares))
    rounds = np.array(sorted({round for round, _ in complete}), dtype=np.int64)
    return _Levels(rounds, ["mixing", "local"], _stack(rounds, between))


def _global_records(
    ledger: Ledger, split: str, shares: np.ndarray | None, moment: str
) -> np.ndarray:
    """The records of the global model at a moment. Those before a drift get the previous time step,
    whose shares they are weighted by.
    """
    records = select_whole(ledger, moment, split, shares)
    records = np.asarray(records[records["model"] == GLOBAL])
    if split != "test":
        records = records[on_examples_of(records, ledger.select(moment="local", split=split))]
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
    """Accuracy by class, mean over models, by round."""
    found = accuracies_by_model(records, shares)
    return {
        int(round): nan_mean(found.per_class[found.round == round], axis=0)
        for round in np.unique(found.round)
    }


def _mean_of_clients(local: LocalModels) -> dict[int, np.ndarray]:
    """Accuracy by class, mean over clients by aggregation weight (equal if none are known)."""
    means = {}
    for round in np.unique(local.round):
        here = local.round == round
        weight = local.weight[here] if local.weight[here].sum() > 0 else np.ones(here.sum())
        means[int(round)] = (weight[:, None] * local.end[here]).sum(axis=0) / weight.sum()
    return means


def _stack(rounds: np.ndarray, levels: list[dict[int, np.ndarray]]) -> list[np.ndarray]:
    return [np.array([level[int(round)] for round in rounds]) for level in levels]
