"""Findings about a method: what was forgotten, in which phase, of which classes; what weakens the
numbers; and methods against each other.

Nothing is claimed beyond the numbers: a loss that the seeds do not tell from zero gets no cure, one
seed cannot tell, what was not recorded is not guessed, and what goes together is not called a
cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from remanence.diagnosis.recommendations import Recommendation, recommend_for_phase
from remanence.diagnosis.wording import (
    MATTERS,
    Finding,
    describe_change,
    describe_noise,
    join,
    label_counts,
    largest,
    points,
)
from remanence.metrics.accuracy_tables import local_models, nan_mean
from remanence.metrics.cached import (
    PHASE_WORDS,
    class_losses,
    decomposition_of,
    ledger_of,
    phase_means,
)
from remanence.metrics.forgetting import class_drops, forgetting_curve, forgetting_since_best
from remanence.metrics.groups import Group, class_curve, class_names_of, mean_of
from remanence.metrics.seed_noise import seed_noise
from remanence.metrics.summary_rows import MethodRow
from remanence.report.theme import name_classes


def describe_forgetting(group: Group, row: MethodRow) -> Finding:
    """The model that counts, from round to round and against its best."""
    curves = [shares for rounds, shares in map(class_curve, group.runs) if len(rounds) > 1]
    lost = seed_noise(
        mean_of(found.values()) or 0.0 for run in group.runs if (found := forgetting_curve(run))
    )
    place = f"after round {row.last_round} the test accuracy is {points(row.accuracy)} %"
    if lost is None or not curves:
        return Finding(
            "forgetting",
            f"{place[0].upper()}{place[1:]}; one recorded round alone shows no forgetting.",
            {"accuracy": row.accuracy},
        )
    since_best = seed_noise(forgetting_since_best(shares) for shares in curves)
    drops = nan_mean(np.concatenate([class_drops(shares) for shares in curves]), axis=0)
    names = _classes(group, len(drops))
    worst = largest(drops, names)
    sentence = (
        f"{place[0].upper()}{place[1:]}. From one recorded round to the next a class lost"
        f" {points(lost.mean, 2)} points on average"
    )
    sentence += (
        (
            " (gains not counted), most of all"
            f" {join(f'{name} ({points(value)})' for name, value in worst)}."
        )
        if worst
        else "."
    )
    # never below 0, so noise alone would also be above it: no verdict
    if lost.deviation is not None:
        sentence += (
            f" The deviation of that over {lost.seeds} seeds is {points(lost.deviation, 2)}."
        )
    if since_best is not None:
        level = (
            f"{points(abs(since_best.mean))} points {'below' if since_best.mean > 0 else 'above'}"
        )
        sentence += (
            f" At the end classes are on average {level} their best earlier round."
            f" {describe_noise(abs(since_best))}"
        )
    evidence = {
        "accuracy": row.accuracy, "accuracy_deviation": row.deviation, "lost_a_round": lost.as_dict(), 
        "since_best": since_best.as_dict() if since_best else None,
        "classes": dict(worst),
    }  # fmt: skip
    return Finding("forgetting", sentence, evidence)


def describe_phases(group: Group) -> list[Finding]:
    """Which phase loses, which classes in it, and what fits that."""
    losses = {
        phase: noise
        for phase, values in phase_means(group).items()
        if (noise := seed_noise(values)) is not None
    }
    if not losses:
        cure = Recommendation(
            "--record-local",
            "evaluates every client's model after local training, so that the phases of a"
            " round can be told apart",
        )
        return [
            Finding(
                "where it was lost",
                "The clients' models were not recorded, so nobody can say in which phase"
                " it was lost.",
                {},
                (cure,),
            )
        ]
    told = [
        f"{PHASE_WORDS[phase]} {describe_change(noise.mean)}" for phase, noise in losses.items()
    ]
    worst = max(losses, key=lambda phase: losses[phase].mean)
    evidence: dict[str, Any] = {
        "phases": {phase: noise.as_dict() for phase, noise in losses.items()}
    }
    start = f"In an average round, in points of accuracy averaged over classes, {join(told)}."
    if losses[worst].mean < MATTERS:
        return [
            Finding("where it was lost", f"{start} No phase loses enough to need a cure.", evidence)
        ]
    names = _classes(group, len(class_losses(group)[worst]))
    classes = largest(class_losses(group)[worst], names)
    evidence |= {"worst_phase": worst, "classes": dict(classes)}
    start += (
        f" Most is lost in {PHASE_WORDS[worst]}, above all of"
        f" {join(f'{name} ({points(value)})' for name, value in classes)}."
    )
    sentence = f"{start} {describe_noise(losses[worst])}"
    if losses[worst].verdict == "noise":
        return [Finding("where it was lost", sentence, evidence)]
    absent = _compare_absent(group) if worst == "local" else None
    if absent is None:
        return [
            Finding(
                "where it was lost", sentence, evidence, recommend_for_phase(worst, group, None)
            )
        ]
    lacking, held, numbers = absent
    both = (
        f"Of a class that a client does not hold, its training loses {points(lacking)} points;"
        " of one that it holds, "
    )
    both += f"{points(held)}." if held >= 0 else f"nothing: it gains {points(-held)}."
    return [
        Finding("where it was lost", sentence, evidence),
        Finding(
            "absent classes", both, numbers, recommend_for_phase(worst, group, (lacking, held))
        ),
    ]


def _compare_absent(group: Group) -> tuple[float, float, dict[str, Any]] | None:
    """What local training loses of classes a client lacks and of those it holds. -> both means,
    evidence; None where label counts are not known for good
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
    """What makes the numbers above weaker than they look."""
    told = []
    if row.unfinished:
        told.append(
            f"{row.unfinished} of {row.planned} runs are unfinished, so these numbers are of"
            " the rounds so far"
        )
    if row.rejected or row.abandoned:
        told.append(
            f"{row.rejected} replies were refused and {row.abandoned} rounds abandoned: a"
            " client that is shut out can look forgotten"
        )
    evidence = {"unfinished": row.unfinished, "rejected": row.rejected, "abandoned": row.abandoned}
    return [
        Finding("beware", f"{text[0].upper()}{text[1:]}.", evidence)
        for text in ["; ".join(told)]
        if text
    ]


def compare(groups: Sequence[Group]) -> Finding:
    """Who forgets least, against the next, seed by seed where they share seeds."""
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
            "Fewer than two methods have recorded rounds enough to compare what they forget.",
            {"lost_a_round": means},
        )
    first, second = sorted(means, key=lambda label: means[label])[:2]
    shared = sorted(forgotten[first].keys() & forgotten[second].keys())
    gap = seed_noise(forgotten[second][seed] - forgotten[first][seed] for seed in shared)
    sentence = (
        f"{first} forgets least from round to round ({points(means[first], 2)} points),"
        f" next is {second} ({points(means[second], 2)})."
    )
    if gap is None:
        sentence += " They share no seed, so the difference is not weighed against noise."
    else:
        sentence += f" {describe_noise(gap, 'Seed by seed the difference')}"
    return Finding(
        "comparison",
        sentence,
        {"lost_a_round": means, "difference": gap.as_dict() if gap else None, "seeds": shared},
    )


def _classes(group: Group, count: int) -> list[str]:
    return [
        f"class {name}" if name.isdigit() else name
        for name in name_classes(class_names_of(group), count)
    ]
