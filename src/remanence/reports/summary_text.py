"""The summary of a report in sentences: which method is best and by how much, what was forgotten,
which runs have problems. Every sentence follows from the recorded numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remanence.metrics.cached import phase_means
from remanence.metrics.group_stats import rank_clients, same_cluster_share, worst_phase
from remanence.metrics.groups import (
    Group,
    abandoned_rounds,
    abandonment_reasons,
    mean_of,
    primary_model,
    rejections,
)
from remanence.metrics.summary_rows import MethodRow, margin, not_separated, rank
from remanence.reports.phrases import (
    CLASS_FORGETTING,
    PHASE_CHANGES,
    describe_abandoned,
    describe_class_forgetting,
    describe_drop,
    describe_phases,
    describe_rejected,
    describe_unfinished,
    describe_worst_phase,
    list_warnings,
    with_deviation,
)
from remanence.reports.table_columns import percent

MAX_NAMED = 4  # clients or methods named in a sentence
MAX_ROUNDS = 8  # abandoned rounds listed by number
# methods whose phases are described each; of more, only the one that loses most in a phase and
# the one that loses least
MAX_METHODS = 4


def summarize_groups(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    """Sentences about groups and their rows, the most important first."""
    return [
        *(f"Warning: {text}." for text in list_warnings(groups)),
        *describe_accuracy(groups, rows),
        *_describe_selection(rows),
        *_describe_forgetting(groups, rows),
        *_describe_phases(groups),
        *_describe_drift(rows),
        *_describe_peer_selection(groups),
        *_describe_unfinished(rows),
        *_describe_rejections(groups, rows),
    ]


def describe_accuracy(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    """Which method has the highest accuracy, and whether the seeds separate it from the others."""
    tested = _describe_tested(groups)
    return _compare(rows, tested) if len(rank(rows)) > 1 else _describe_single(rows, tested)


def _describe_tested(groups: Sequence[Group]) -> str:
    """Which model is evaluated on which data."""
    runs = [run for group in groups for run in group.runs]
    if {primary_model(run) for run in runs} <= {"global"}:
        return "on the test set"
    drifting = any(run.metadata.get("clusters") for run in runs)
    data = "test examples of their own cluster" if drifting else "the test set"
    return f"(the clients' own models, on {data})"


def _describe_single(rows: Sequence[MethodRow], tested: str) -> list[str]:
    """One method alone."""
    row = next((row for row in rows if row.accuracy is not None), None)
    if row is None:
        return ["No round has been evaluated yet, so there are no results."]
    worst = (
        f" The lowest accuracy of a class is {percent(row.worst_class)} %."
        if row.worst_class is not None
        else ""
    )
    return [
        f"{row.label} has an accuracy of {_accuracy(row)} {tested} after round {row.last_round};"
        f" its best round reached {percent(row.best)} %.{worst}"
    ]


def _compare(rows: Sequence[MethodRow], tested: str) -> list[str]:
    """The method with the highest accuracy against the next."""
    ranked = rank(rows)
    first, second = ranked[:2]
    gap = margin(ranked)
    if gap == 0:
        return [
            f"{first.label} and {second.label} have the same accuracy: {_accuracy(first)} {tested}."
        ]
    sentences = [
        f"{first.label} has the highest accuracy: {_accuracy(first)} {tested} after round"
        f" {first.last_round}, {percent(gap)} points above the next method,"
        f" {second.label} ({_accuracy(second)}).",
        _describe_separation(ranked),
    ]
    if len({row.last_round for row in ranked}) > 1:
        ends = ", ".join(f"{row.label} {row.last_round}" for row in ranked)
        sentences.append(f"Warning: the methods are compared at different rounds ({ends}).")
    return sentences


def _describe_separation(ranked: Sequence[MethodRow]) -> str:
    """Whether the seeds separate the first method from the others."""
    first, others = ranked[0], not_separated(ranked)
    if min(first.seeds, *(row.seeds for row in ranked[1:])) < 2:
        return "One seed is not enough to tell this from noise: repeat it with --seeds 3."
    basis = "95 % intervals of the differences between equal seeds" + (
        f", adjusted for {len(ranked) - 1} comparisons" if len(ranked) > 2 else ""
    )
    if not others:
        return f"It is best: the seeds separate it from every other method ({basis})."
    names = ", ".join(row.label for row in others[:MAX_NAMED])
    more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    return (
        "No method is clearly best: the seeds do not separate it from"
        f" {names}{more} ({basis}, {first.seeds} seeds)."
    )


def _accuracy(row: MethodRow) -> str:
    spread = f" ± {percent(row.deviation)}" if row.deviation is not None else ""
    return f"{percent(row.accuracy)}{spread} %"


def _describe_selection(rows: Sequence[MethodRow]) -> list[str]:
    chosen = [
        f"{row.method} with {row.setting} (of {row.variants})" for row in rows if row.variants > 1
    ]
    if not chosen:
        return []
    return [f"Settings selected by validation accuracy, without the test set: {'; '.join(chosen)}."]


def _describe_forgetting(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    pairs = [pair for pair in zip(groups, rows, strict=True) if pair[1].forgetting is not None]
    pairs.sort(key=lambda pair: pair[1].forgetting or 0.0)
    parts = [
        f"{row.label} {describe_class_forgetting(group, row.forgetting)}" for group, row in pairs
    ]
    return [f"{CLASS_FORGETTING}: {'; '.join(parts)}."] if parts else []


def _describe_phases(groups: Sequence[Group]) -> list[str]:
    """Which phase of a round loses, of which classes, and in which client; for methods whose
    local models were recorded.
    """
    known = sorted(
        (group for group in groups if phase_means(group)),
        key=lambda group: -max(mean_of(losses) or 0.0 for losses in phase_means(group).values()),
    )
    parts = []
    for group in known if len(known) <= MAX_METHODS else (known[0], known[-1]):
        phase = worst_phase(group)
        assert phase is not None
        changes = f"{group.label}: {describe_phases(group)}"
        if (mean_of(phase_means(group)[phase]) or 0.0) <= 0:
            parts.append(f"{changes}; no phase loses accuracy on average")
            continue
        client = _describe_worst_client(group) if phase == "local" else ""
        parts.append(f"{changes}; {describe_worst_phase(group, phase)}{client}")
    return [f"{PHASE_CHANGES}. {'. '.join(parts)}."] if parts else []


def _describe_worst_client(group: Group) -> str:
    ranking = rank_clients(group)
    if ranking is None:
        return ""
    seed = f" of seed {ranking.seed}" if len(group.runs) > 1 else ""
    return f"; client {ranking.clients[0]}{seed} loses most ({percent(float(ranking.loss[0]))})"


def _describe_drift(rows: Sequence[MethodRow]) -> list[str]:
    parts = []
    for row in rows:
        if row.performance is None:
            continue
        words = [
            f"{row.label} has {percent(row.performance)} % at the end of a time step (performance)"
        ]
        if row.convergence is not None:
            words.append(
                f"reaches 90 % of a time step's gain after {row.convergence:.1f} rounds"
                " (convergence)"
            )
        if row.robustness is not None:
            words.append(f"after a drift its clients {describe_drop(row.robustness)} (robustness)")
        parts.append(", ".join(words))
    return [f"Accuracy under drift, averaged over clients: {'; '.join(parts)}."] if parts else []


def _describe_peer_selection(groups: Sequence[Group]) -> list[str]:
    known = [(group, found) for group in groups if (found := same_cluster_share(group)) is not None]
    if not known:
        return []
    parts = [f"{group.label} {with_deviation(found.shares, 0)} %" for group, found in known]
    return [
        f"Share of peer selections within a client's own cluster: {'; '.join(parts)};"
        f" randomly drawn peers {percent(known[0][1].by_chance, 0)} %."
    ]


def _describe_unfinished(rows: Sequence[MethodRow]) -> list[str]:
    parts = [f"{row.label}: {text}" for row in rows if (text := describe_unfinished(row))]
    if not parts:
        return []
    return [f"{'; '.join(parts)}. These numbers are from the last recorded round so far."]


def _describe_rejections(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    sentences = []
    for group, row in zip(groups, rows, strict=True):
        if row.rejected:
            sentences.append(
                f"{row.label}: {describe_rejected(row)} ({_list_rejections(group)}) and did not"
                " change the model."
            )
        if row.abandoned:
            rounds = sorted({round for run in group.runs for round in abandoned_rounds(run)})
            shown = ", ".join(map(str, rounds[:MAX_ROUNDS]))
            shown += ", …" if len(rounds) > MAX_ROUNDS else ""
            reasons = [reason for run in group.runs for reason in abandonment_reasons(run)]
            reason = "; ".join(dict.fromkeys(reasons)) or "too few replies were valid"
            sentences.append(
                f"{row.label}: {describe_abandoned(row)} because {reason} (round {shown})."
            )
    if not sentences and any(row.seeds for row in rows):
        return ["No reply was rejected and no round was abandoned."]
    return sentences


def _list_rejections(group: Group) -> str:
    counts: Counter[tuple[int, str]] = sum((rejections(run) for run in group.runs), Counter())
    named = [
        f"client {client}, {code}, {'once' if often == 1 else f'{often} times'}"
        for (client, code), often in counts.most_common(MAX_NAMED)
    ]
    more = f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
    return "; ".join(named) + more
