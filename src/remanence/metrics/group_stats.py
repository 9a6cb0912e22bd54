"""What a method forgot, as numbers that the report's summary and `remanence diagnose` share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import (
    decomposition_of,
    first_with_losses,
    peer_usage_of,
    phase_means,
)
from remanence.metrics.forgetting import class_drops, forgetting_curve
from remanence.metrics.groups import Group, class_curve, mean_of


def forgetting_per_seed(group: Group) -> list[float]:
    """Round-wise forgetting averaged over rounds: one number a seed with two recorded rounds."""
    curves = [forgetting_curve(run) for run in group.runs]
    return [mean_of(curve.values()) or 0.0 for curve in curves if curve]


def forgetting_by_class(group: Group) -> np.ndarray:
    """Round-wise forgetting of every class, averaged over rounds and seeds [C]; gains count as 0.

    Empty where no run has two recorded rounds.
    """
    curves = [shares for rounds, shares in map(class_curve, group.runs) if len(rounds) > 1]
    if not curves:
        return np.zeros(0)
    return nan_mean(np.concatenate([class_drops(shares) for shares in curves]), axis=0)


def worst_phase(group: Group) -> str | None:
    """The phase of a round with the largest mean loss; None without recorded local models."""
    means = {phase: mean_of(values) or 0.0 for phase, values in phase_means(group).items()}
    return max(means, key=lambda phase: means[phase]) if means else None


@dataclass(frozen=True)
class ClientRanking:
    """What the local training of clients loses, the largest loss first.

    Of one seed, since clients differ between seeds.
    """

    seed: int
    clients: np.ndarray  # [n]
    loss: np.ndarray  # [n] mean over classes and recorded rounds
    mean: float  # over all clients


def rank_clients(group: Group) -> ClientRanking | None:
    """Clients by what their training loses; None with fewer than two recorded clients."""
    run = first_with_losses(group)
    lost = decomposition_of(run) if run is not None else None
    if run is None or lost is None or len(lost.clients.clients) < 2:
        return None
    loss = nan_mean(lost.clients.loss, axis=1)
    order = np.argsort(-np.nan_to_num(loss, nan=-np.inf), kind="stable")
    return ClientRanking(
        run.config.seed, lost.clients.clients[order], loss[order], float(nan_mean(loss))
    )


@dataclass(frozen=True)
class SameClusterShare:
    """The share of peer selections within the selecting client's own cluster."""

    shares: list[float]  # one a seed
    by_chance: float  # the same share with peers drawn at random

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)


def same_cluster_share(group: Group) -> SameClusterShare | None:
    """None where data do not drift, and where clients select no peers."""
    found = [usage for run in group.runs if (usage := peer_usage_of(run)) is not None]
    pairs = [(float(nan_mean(one.same_cluster)), float(nan_mean(one.chance))) for one in found]
    known = [pair for pair in pairs if not np.isnan(pair).any()]
    if not known:
        return None
    return SameClusterShare([own for own, _ in known], sum(c for _, c in known) / len(known))
