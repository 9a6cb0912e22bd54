"""Findings about clients: losses in local training and by aggregation, and the effect of drift."""

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
from remanence.reports.phrases import NAMED, describe_drop, join_words
from remanence.reports.table_columns import percent
from remanence.results.client_names import client_label

MIN_CLIENTS = 10  # for a correlation with the size of clients
MAX_P_VALUE = 0.05  # of such a correlation


def describe_clients(group: Group) -> list[Finding]:
    """The clients whose local training loses most, and whether the loss correlates with their size.
    Of one seed, since clients differ between seeds.
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
        f"{client_label(run, client)} ({percent(lost)} points{_describe(counts, client)})"
        for client, lost in worst.items()
    ]
    sentence = f"With seed {ranking.seed}, the training of {join_words(named)} loses most; "
    sentence += f"the mean over {len(clients)} clients is {percent(ranking.mean)}."
    evidence: dict[str, Any] = {"seed": ranking.seed, "clients": worst}
    known = clients < len(counts)
    if known.sum() >= MIN_CLIENTS:
        rows, classes = counts[clients[known]].sum(axis=1), (counts[clients[known]] > 0).sum(axis=1)
        for values, few, many in (
            (rows, "few examples", "many examples"),
            (classes, "few classes", "many classes"),
        ):
            correlation, p_value = _rank_correlation(values, loss[known])
            if p_value < MAX_P_VALUE:
                sentence += (
                    f" Clients with {few if correlation < 0 else many} lose more (rank"
                    f" correlation {correlation:+.2f}); this does not prove a cause."
                )
                evidence[f"rank_correlation_with_{few.split()[1]}"] = {
                    "value": correlation,
                    "p": p_value,
                }
    ledger = ledger_of(run)
    if ledger is not None and client_forgetting_rounds(ledger):
        cross = client_forgetting(ledger)
        mean = float(nan_mean(cross.mean))
        sentence += (
            f" In round {cross.round} a client's training cost the others {percent(mean)}"
            " points on their own validation examples (mean F_k)."
        )
        evidence["mean_F_k"] = {"round": cross.round, "value": mean}
    return [Finding("clients", sentence, evidence)]


def describe_examples(group: Group) -> list[Finding]:
    """Training examples that clients lose by aggregation, if single examples were recorded."""
    found = [examples for run in group.runs if (examples := forgettable_of(run)) is not None]
    share = seed_noise(
        float(examples.count.sum() / max(examples.evaluated.sum(), 1)) for examples in found
    )
    if share is None:
        return []
    sentence = (
        f"Of the clients' own training examples, {percent(share.mean)} % were right after local"
        " training and wrong after merging."
    )
    return [Finding("examples", sentence, {"forgettable": share.as_dict()})]


def describe_drift(group: Group, row: MethodRow) -> list[Finding]:
    """The loss by a drift and, without a server, the share of peers from the own cluster."""
    drops = seed_noise(
        pair[1].robustness for run in group.runs if (pair := drift_of(run)) is not None
    )
    if drops is None:
        return []
    sentence = f"After a drift clients {describe_drop(drops.mean)}"
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
        evidence["previous_concepts"] = row.previous_concepts
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
    matters = drops.mean >= MATTERS and drops.verdict != "noise"
    return [
        Finding(
            "drift", sentence, evidence, recommend_for_drift(group, own, chance) if matters else ()
        )
    ]


def _rank_correlation(values: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation and its p-value; 0 and 1 if either side is constant."""
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
