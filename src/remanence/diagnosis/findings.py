"""Findings about a method: what was forgotten, in which phase, of which classes; what makes the
numbers less reliable; and a comparison of methods.

Findings state only what the numbers support: there is no recommendation against a loss within the
noise between seeds, nothing is concluded from one seed or guessed if it was not recorded, and a
correlation is not called a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import Recommendation, recommend_for_phase
from remanence.diagnosis.wording import (
    MATTERS,
    Finding,
    describe_noise,
    label_counts,
)
from remanence.metrics.accuracy_tables import local_models, nan_mean
from remanence.metrics.cached import (
    class_losses,
    decomposition_of,
    ledger_of,
    phase_means,
)
from remanence.metrics.forgetting import forgetting_curve, forgetting_since_best
from remanence.metrics.group_stats import forgetting_by_class, forgetting_per_seed, worst_phase
from remanence.metrics.groups import Group, class_curve, mean_of
from remanence.metrics.seed_noise import seed_noise
from remanence.metrics.summary_rows import MethodRow
from remanence.reports.phrases import (
    CLASS_FORGETTING,
    PHASE_CHANGES,
    describe_abandoned,
    describe_class_forgetting,
    describe_phases,
    describe_rejected,
    describe_unfinished,
    describe_worst_phase,
    largest_losses,
)
from remanence.reports.table_columns import percent


def describe_forgetting(group: Group, row: MethodRow) -> Finding:
    """Forgetting of the primary model: between recorded rounds, and since its best round."""
    curves = [shares for rounds, shares in map(class_curve, group.runs) if len(rounds) > 1]
    lost = seed_noise(forgetting_per_seed(group))
    level = f"after round {row.last_round} the test accuracy is {percent(row.accuracy)} %"
    if lost is None or not curves:
        return Finding(
            "forgetting",
            f"{level[0].upper()}{level[1:]}; one recorded round alone shows no forgetting.",
            {"accuracy": row.accuracy},
        )
    since_best = seed_noise(forgetting_since_best(shares) for shares in curves)
    sentence = (
        f"{level[0].upper()}{level[1:]}. {CLASS_FORGETTING}:"
        f" {describe_class_forgetting(group, lost.mean)}."
    )
    # never below 0, so an interval that excludes 0 would mean nothing
    if lost.deviation is not None:
        sentence += (
            f" The deviation of that over {lost.seeds} seeds is {percent(lost.deviation, 2)}."
        )
    if since_best is not None:
        gap = (
            f"{percent(abs(since_best.mean))} points {'below' if since_best.mean > 0 else 'above'}"
        )
        sentence += (
            f" At the end classes are on average {gap} their best earlier round."
            f" {describe_noise(abs(since_best))}"
        )
    evidence = {
        "accuracy": row.accuracy,
        "accuracy_deviation": row.deviation,
        "lost_a_round": lost.as_dict(),
        "since_best": since_best.as_dict() if since_best else None,
        "classes": largest_losses(group, forgetting_by_class(group)),
    }
    return Finding("forgetting", sentence, evidence)


def find_phases(group: Group) -> list[Finding]:
    """The phase that loses most, the classes that it loses, and recommendations."""
    losses = {
        phase: noise
        for phase, values in phase_means(group).items()
        if (noise := seed_noise(values)) is not None
    }
    if not losses:
        recommendation = Recommendation(
            "--record-local",
            "evaluates every client's model after local training, so that the phases of a"
            " round can be distinguished",
        )
        return [
            Finding(
                "where it was lost",
                "The clients' models were not recorded, so the phase in which it was lost is"
                " unknown.",
                {},
                (recommendation,),
            )
        ]
    worst = worst_phase(group)
    assert worst is not None
    evidence: dict[str, Any] = {
        "phases": {phase: noise.as_dict() for phase, noise in losses.items()}
    }
    start = f"{PHASE_CHANGES}: {describe_phases(group)}."
    if losses[worst].mean < MATTERS:
        return [
            Finding(
                "where it was lost",
                f"{start} No phase loses enough for a recommendation.",
                evidence,
            )
        ]
    classes = largest_losses(group, class_losses(group)[worst])
    evidence |= {"worst_phase": worst, "classes": classes}
    most = describe_worst_phase(group, worst)
    sentence = f"{start} {most[0].upper()}{most[1:]}. {describe_noise(losses[worst])}"
    if losses[worst].verdict == "noise":
        return [Finding("where it was lost", sentence, evidence)]
    absent = _compare_absent(group) if worst == "local" else None
    if absent is None:
        recommendations = recommend_for_phase(worst, group, None)
        return [Finding("where it was lost", sentence, evidence, recommendations)]
    return [Finding("where it was lost", sentence, evidence), _describe_absent(group, *absent)]


def _describe_absent(
    group: Group, lacking: float, held: float, evidence: dict[str, Any]
) -> Finding:
    sentence = (
        f"Of a class that a client lacks, its local training loses {percent(lacking)} points;"
        " of one that it has, "
    )
    sentence += f"{percent(held)}." if held >= 0 else f"nothing: it gains {percent(-held)}."
    recommendations = recommend_for_phase("local", group, (lacking, held))
    return Finding("absent classes", sentence, evidence, recommendations)


def _compare_absent(group: Group) -> tuple[float, float, dict[str, Any]] | None:
    """The mean loss of local training on classes that a client lacks and on those that it has, with
    evidence; None if the label counts are unknown or change.
    """
    lacking, held, pairs = [], [], [0, 0]
    for run in group.runs:
        counts, ledger = label_counts(run), ledger_of(run)
        if decomposition_of(run) is None or ledger is None or not counts.size:
            continue
        local = local_models(ledger)
        known = local.client < len(counts)
        lost, holds = (local.start - local.end)[known], counts[local.client[known]] > 0
        lacking.append(float(nan_mean(np.where(holds, np.nan, lost))))
        held.append(float(nan_mean(np.where(holds, lost, np.nan))))
        pairs = [pairs[0] + int((~holds).sum()), pairs[1] + int(holds.sum())]
    absent, present = seed_noise(lacking), seed_noise(held)
    if absent is None or present is None:
        return None
    evidence = {
        "absent": absent.as_dict(),
        "present": present.as_dict(),
        "pairs_of_model_and_class": {"absent": pairs[0], "present": pairs[1]},
    }
    return absent.mean, present.mean, evidence


def describe_warnings(row: MethodRow) -> list[Finding]:
    """What makes the numbers of a method less reliable."""
    problems = [describe_unfinished(row), describe_rejected(row), describe_abandoned(row)]
    text = "; ".join(filter(None, problems))
    if not text:
        return []
    if row.rejected or row.abandoned:
        text += " (a client whose replies are missing can appear forgotten)"
    evidence = {"unfinished": row.unfinished, "rejected": row.rejected, "abandoned": row.abandoned}
    return [Finding("warning", f"{text}.", evidence)]


def compare(groups: Sequence[Group]) -> Finding:
    """The method that forgets least against the next one, by seed if they share seeds."""
    forgotten = {
        group.label: {
            run.config.seed: value
            for run in group.runs
            if (value := mean_of(forgetting_curve(run).values())) is not None
        }
        for group in groups
    }
    means = {
        label: sum(values.values()) / len(values) for label, values in forgotten.items() if values
    }
    if len(means) < 2:
        return Finding(
            "comparison",
            "Fewer than two methods have recorded enough rounds to compare what they forget.",
            {"lost_a_round": means},
        )
    first, second = sorted(means, key=lambda label: means[label])[:2]
    shared = sorted(forgotten[first].keys() & forgotten[second].keys())
    gap = seed_noise(forgotten[second][seed] - forgotten[first][seed] for seed in shared)
    sentence = (
        f"{first} forgets least from one recorded round to the next ({percent(means[first], 2)}"
        " points),"
        f" next is {second} ({percent(means[second], 2)})."
    )
    if gap is None:
        sentence += " They share no seed, so the difference is not compared with the noise."
    else:
        sentence += f" {describe_noise(gap, 'Seed by seed the difference')}"
    return Finding(
        "comparison",
        sentence,
        {"lost_a_round": means, "difference": gap.as_dict() if gap else None, "seeds": shared},
    )
