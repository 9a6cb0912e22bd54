"""Findings about clients: whose training loses, what merging costs them, and how they live
through a drift.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import recommend_for_drift
from remanence.diagnosis.wording import (
    MATTERS,
    Finding,
    describe_noise,
    label_counts,
)
from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import (
    drift_of,
    first_with_losses,
    forgettable_of,
    ledger_of,
)
from remanence.metrics.forgetting import client_forgetting, client_forgetting_rounds
from remanence.metrics.group_stats import rank_clients, same_cluster_share
from remanence.metrics.groups import Group
from remanence.metrics.seed_noise import seed_noise
from remanence.metrics.summary_rows import MethodRow
from remanence.report.phrases import NAMED, join_words
from remanence.report.table_columns import percent

FEW_CLIENTS = 10  # with fewer, no statement on what large or small clients have in common
PROBABLE = 0.05  # of a chance finding, for such a statement


def describe_clients(group: Group) -> list[Finding]:
    """Whose training loses most, and what they have in common; of one seed, since clients
    differ between seeds.
    """
    run, ranking = first_with_losses(group), rank_clients(group)
    if run is None or ranking is None or not ranking.loss[0] > 0:
        return []
    clients, loss, counts = ranking.clients, ranking.loss, label_counts(run)
    worst = {
        int(clients[place]): float(loss[place])
        for place in range(min(NAMED, len(loss)))
        if loss[place] > 0
    }
    named = [
        f"client {client} ({percent(lost)} points{_describe(counts, client)})"
        for client, lost in worst.items()
    ]
    sentence = f"With seed {ranking.seed}, the training of {join_words(named)} loses most; "
    sentence += f"the mean over {len(clients)} clients is {percent(ranking.mean)}."
    evidence: dict[str, Any] = {"seed": ranking.seed, "clients": worst}
    known = clients < len(counts)
    if known.sum() >= FEW_CLIENTS:
        rows, classes = counts[clients[known]].sum(axis=1), (counts[clients[known]] > 0).sum(axis=1)
        for values, few, many in (
            (rows, "few examples", "many examples"),
            (classes, "few classes", "many classes"),
        ):
            rank, chance = _rank_correlation(values, loss[known])
            if chance < PROBABLE:
                sentence += (
                    f" Clients with {few if rank < 0 else many} lose more (rank"
                    f" correlation {rank:+.2f}); that is no proof of a cause."
                )
                evidence[f"rank_correlation_with_{few.split()[1]}"] = {"value": rank, "p": chance}
    ledger = ledger_of(run)
    if ledger is not None and client_forgetting_rounds(ledger):
        cross = client_forgetting(ledger)
        mean = float(nan_mean(cross.mean))
        sentence += (
            f" In round {cross.round} a client's training cost the others {percent(mean)}"
            " points on their own validation rows (mean F_k)."
        )
        evidence["mean_F_k"] = {"round": cross.round, "value": mean}
    return [Finding("clients", sentence, evidence)]


def describe_examples(group: Group) -> list[Finding]:
    """What merging makes the clients lose of their own training rows, where single examples
    were recorded.
    """
    found = [examples for run in group.runs if (examples := forgettable_of(run)) is not None]
    share = seed_noise(
        float(examples.count.sum() / max(examples.evaluated.sum(), 1)) for examples in found
    )
    if share is None:
        return []
    sentence = (
        f"Of the clients' own training rows, {percent(share.mean)} % were right after local"
        " training and wrong after merging."
    )
    return [Finding("examples", sentence, {"forgettable": share.as_dict()})]


def describe_drift(group: Group, row: MethodRow) -> list[Finding]:
    """What a drift costs, and whether clients without a server find their own kind."""
    drops = seed_noise(
        pair[1].robustness for run in group.runs if (pair := drift_of(run)) is not None
    )
    if drops is None:
        return []
    fall = (
        f"fall by {percent(drops.mean)} points at worst"
        if drops.mean > 0
        else f"stay {percent(-drops.mean)} points above what they had, even at worst,"
    )
    sentence = f"After a drift clients {fall}"
    evidence: dict[str, Any] = {
        "drop": drops.as_dict(),
        "recovery_rounds": row.recovery,
        "never_recovered": row.never_recovered,
    }
    if row.recovery is not None and drops.mean > 0:
        sentence += f" and are back after {row.recovery:.1f} rounds"
    if row.never_recovered and drops.mean > 0:
        sentence += (
            f" ({percent(row.never_recovered, 0)} % are not back before the next drift or the end)"
        )
    sentence += "."
    if row.previous_concepts is not None:
        evidence["left_concepts"] = row.previous_concepts
        word = "lost" if row.previous_concepts >= 0 else "gained"
        sentence += (
            f" On clusters that they have left they {word} {percent(abs(row.previous_concepts))}"
            " points since."
        )
    found = same_cluster_share(group)
    own, chance = (found.mean, found.by_chance) if found is not None else (None, None)
    if found is not None:
        evidence |= {"same_cluster_share": own, "same_cluster_share_by_chance": chance}
        sentence += (
            f" {percent(own, 0)} % of their peer selections are within their own cluster, where"
            f" randomly drawn peers give {percent(chance, 0)} %."
        )
    sentence += f" {describe_noise(drops)}"
    needs = drops.mean >= MATTERS and drops.verdict != "noise"
    return [
        Finding(
            "drift", sentence, evidence, recommend_for_drift(group, own, chance) if needs else ()
        )
    ]


def _rank_correlation(values: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """Spearman's, and the probability of one as large by chance; 0 and 1 where either does not
    vary.
    """
    known = ~np.isnan(loss)
    if len(set(values[known].tolist())) < 2 or len(set(loss[known].tolist())) < 2:
        return 0.0, 1.0
    from scipy.stats import spearmanr

    found = spearmanr(values[known], loss[known])
    return float(found.statistic), float(found.pvalue)


def _describe(counts: np.ndarray, client: int) -> str:
    if client >= len(counts):
        return ""
    classes = int((counts[client] > 0).sum())
    return (
        f", {int(counts[client].sum())} examples of {classes} class{'' if classes == 1 else 'es'}"
    )
