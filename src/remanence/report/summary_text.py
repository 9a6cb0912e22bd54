"""The summary of a report in words: who is best, by how much, what was forgotten, what went
wrong. It never claims more than the numbers show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import (
    PHASE_WORDS,
    class_losses,
    client_losses,
    peer_usage_of,
    phase_means,
)
from remanence.metrics.forgetting import class_drops
from remanence.metrics.groups import (
    Group,
    abandoned_rounds,
    class_curve,
    class_names_of,
    deviation_of,
    mean_of,
    primary_model,
    rejections,
)
from remanence.metrics.summary_rows import MethodRow, margin, rank
from remanence.report.table_columns import percent
from remanence.report.theme import name_classes

MOST_NAMED = 4  # clients named in a sentence on refused replies
# methods of which each is told where it lost; of more, the one that loses most in a phase and the
# one that loses least
MAX_SENTENCES = 4


def summarize_groups(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    """Sentences about groups and their rows, the most important first."""
    tested = _describe_tested(groups)
    verdict = _compare(rows, tested) if len(rank(rows)) > 1 else _describe_ranking(rows, tested)
    forgotten = [*_describe_forgetting(groups, rows), *_describe_phases(groups)]
    drift = [*_describe_drift(rows), *_describe_peer_usage(groups)]
    return [
        *verdict,
        *_explain_choice(rows),
        *forgotten,
        *drift,
        *_describe_unfinished(rows),
        *_describe_rejections(groups, rows),
    ]


def _describe_tested(groups: Sequence[Group]) -> tuple[str, str]:
    """Who classifies, and what: the method itself on the test set, or its clients' own models,
    each on its own kind of data. -> subject and verb, object
    """
    runs = [run for group in groups for run in group.runs]
    if {primary_model(run) for run in runs} <= {"global"}:
        return "it classifies", "the test set"
    kind = (
        "test examples of their own cluster"
        if any(run.metadata.get("clusters") for run in runs)
        else "the test set"
    )
    return "its clients' own models classify", kind


def _describe_ranking(rows: Sequence[MethodRow], tested: tuple[str, str]) -> list[str]:
    """One method alone."""
    row = next((row for row in rows if row.accuracy is not None), None)
    if row is None:
        return ["No round has been evaluated yet, so there is nothing to conclude."]
    subject = (
        f"{row.label} classifies" if tested[0] == "it classifies" else f"{row.label}: {tested[0]}"
    )
    worst = (
        f" Its worst class is right {percent(row.worst_class)} % of the time."
        if row.worst_class is not None
        else ""
    )
    return [
        f"{subject} {_amount(row)} of {tested[1]} rightly after round {row.last_round}; "
        f"its best round reached {percent(row.best)} %.{worst}"
    ]


def _compare(rows: Sequence[MethodRow], tested: tuple[str, str]) -> list[str]:
    """The best against the next."""
    ranked = rank(rows)
    first, second = ranked[:2]
    gap = margin(ranked)
    if gap == 0:
        return [f"{first.label} and {second.label} are level at {_amount(first)} of {tested[1]}."]
    said = [
        f"{first.label} is best: {tested[0]} {_amount(first)} of {tested[1]} rightly after"
        f" round {first.last_round}, "
        f"{percent(gap)} points more than the next, {second.label} ({_amount(second)})."
    ]
    if first.deviation is None or second.deviation is None:
        said.append(
            "With a single seed there is no deviation to measure this difference against: it"
            " may be chance."
        )
    elif gap > max(first.deviation, second.deviation):
        said.append("The difference is larger than the deviation over seeds of either.")
    else:
        said.append(
            "The difference is within the deviation over seeds: these runs do not tell the two"
            " apart."
        )
    if len({row.last_round for row in ranked}) > 1:
        ends = ", ".join(f"{row.label} {row.last_round}" for row in ranked)
        said.append(f"Beware: the methods are compared at different rounds ({ends}).")
    return said


def _amount(row: MethodRow) -> str:
    spread = f" ± {percent(row.deviation)}" if row.deviation is not None else ""
    return f"{percent(row.accuracy)}{spread} %"


def _explain_choice(rows: Sequence[MethodRow]) -> list[str]:
    chosen = [
        f"{row.method} with {row.setting} (of {row.variants})" for row in rows if row.variants > 1
    ]
    return (
        [
            "Settings were chosen by validation accuracy, without a look at the test set:"
            f" {_join(chosen)}."
        ]
        if chosen
        else []
    )


def _describe_forgetting(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    told = []
    for group, row in sorted(
        zip(groups, rows, strict=True), key=lambda pair: pair[1].forgetting or 0.0
    ):
        if row.forgetting is not None:
            hardest = _most_forgotten_class(group) if row.forgetting > 0 else ""
            told.append(f"{row.label} {percent(row.forgetting, 2)} points{hardest}")
    if not told:
        return []
    return [
        "From one recorded round to the next a class lost on average, gains not counted:"
        f" {_join(told)}."
    ]


def _most_forgotten_class(group: Group) -> str:
    """The class with the largest mean drop, over seeds and rounds."""
    curves = [
        shares for rounds, shares in (class_curve(run) for run in group.runs) if len(rounds) > 1
    ]
    drops = nan_mean(np.concatenate([class_drops(shares) for shares in curves]), axis=0)  # [C]
    names = name_classes(class_names_of(group), len(drops))
    worst = int(np.nanargmax(drops))
    return f" (most in class {names[worst]}: {percent(float(drops[worst]), 1)})"


def _describe_phases(groups: Sequence[Group]) -> list[str]:
    """Which phase of a round loses, which class most, and whose training; for methods whose
    local models were recorded.
    """
    told = []
    known = sorted(
        (group for group in groups if phase_means(group)),
        key=lambda group: -max(mean_of(v) or 0.0 for v in phase_means(group).values()),
    )
    for group in known if len(known) <= MAX_SENTENCES else (known[0], known[-1]):
        losses = phase_means(group)
        means = {phase: mean_of(values) or 0.0 for phase, values in losses.items()}
        worst = max(means, key=lambda phase: means[phase])
        if means[worst] <= 0:
            told.append(f"In {group.label} no phase of a round lost accuracy on average.")
            continue
        best = min(means, key=lambda phase: means[phase])
        regained = (
            f", and {PHASE_WORDS[best]} won {percent(-means[best])} back" if means[best] < 0 else ""
        )
        by_class = class_losses(group)[worst]
        label = name_classes(class_names_of(group), len(by_class))[int(np.nanargmax(by_class))]
        who = _most_forgetful_client(group) if worst == "local" else ""
        told.append(
            f"Where {group.label} lost it: {PHASE_WORDS[worst]} cost"
            f" {percent(means[worst])}{_spread(losses[worst])} points a round{regained}; "
            f"most in class {label} ({percent(float(np.nanmax(by_class)))}){who}."
        )
    return told


def _most_forgetful_client(group: Group) -> str:
    """Clients differ from seed to seed, so a client is named for one seed alone."""
    found = client_losses(group)
    if found is None or len(found.clients) < 2:
        return ""
    means = nan_mean(found.loss, axis=1)
    worst = int(np.nanargmax(means))
    seed = f" of seed {group.runs[0].config.seed}" if len(group.runs) > 1 else ""
    return f"; client {found.clients[worst]}{seed} forgot most ({percent(float(means[worst]))})"


def _describe_drift(rows: Sequence[MethodRow]) -> list[str]:
    told = []
    for row in rows:
        if row.performance is None:
            continue
        parts = [f"{row.label} ends a time step at {percent(row.performance)} % (performance)"]
        if row.convergence is not None:
            parts.append(
                f"has 90 % of a step's gain after {row.convergence:.1f} rounds (convergence)"
            )
        if row.robustness is not None:
            parts.append(f"drops by {percent(row.robustness)} points after a drift (robustness)")
        told.append(", ".join(parts))
    return [f"While the data drift, {_join(told)}."] if told else []


def _describe_peer_usage(groups: Sequence[Group]) -> list[str]:
    told, chance = [], None
    for group in groups:
        found = [listening for run in group.runs if (listening := peer_usage_of(run)) is not None]
        shares = [float(nan_mean(listening.same_cluster)) for listening in found]
        if shares:
            told.append(f"{group.label} {percent(mean_of(shares), 0)}{_spread(shares, 0)} %")
            chance = float(nan_mean(found[0].chance)) if chance is None else chance
    if not told:
        return []
    return [
        f"Of all listening, clients gave to their own cluster: {_join(told)}; by chance it"
        f" would be {percent(chance, 0)} %."
    ]


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """The deviation over seeds, where there are several."""
    deviation = deviation_of(values)
    return f" ± {percent(deviation, digits)}" if deviation is not None else ""


def _describe_unfinished(rows: Sequence[MethodRow]) -> list[str]:
    late = [
        f"{row.label} ({row.unfinished} of {row.planned} runs)" for row in rows if row.unfinished
    ]
    return (
        [f"Unfinished: {_join(late)}. Their numbers are those of the last recorded round so far."]
        if late
        else []
    )


def _describe_rejections(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    told = []
    for group, row in zip(groups, rows, strict=True):
        if row.rejected:
            counts: Counter[tuple[int, str]] = sum(
                (rejections(run) for run in group.runs), Counter()
            )
            named = [
                f"client {client}, {code}, {_times(often)}"
                for (client, code), often in counts.most_common(MOST_NAMED)
            ]
            more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
            told.append(
                f"{row.label}: {_count(row.rejected, 'reply was', 'replies were')} refused"
                f" ({'; '.join(named)}{more}) and left the model untouched."
            )
        if row.abandoned:
            rounds = sorted({round for run in group.runs for round in abandoned_rounds(run)})
            shown = ", ".join(map(str, rounds[:8])) + (", …" if len(rounds) > 8 else "")
            told.append(
                f"{row.label}: {_count(row.abandoned, 'round was', 'rounds were')}"
                f" abandoned for want of good replies (round {shown})."
            )
    if not told and any(row.seeds for row in rows):
        return ["No reply was refused and no round was abandoned."]
    return told


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _join(parts: Iterable[str]) -> str:
    """
    >>> _join(["a", "b", "c"])
    'a; b; and c'
    """
    texts = list(parts)
    return texts[0] if len(texts) == 1 else "; ".join(texts[:-1]) + f"; and {texts[-1]}"
