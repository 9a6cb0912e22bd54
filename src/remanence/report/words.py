"""The summary of a report in words: who is best, by how much, what was forgotten, what went wrong. It never claims more than the numbers show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from remanence.report.forgetting import class_drops
from remanence.report.groups import Group, abandoned_rounds, class_curve, nan_mean, refusals
from remanence.report.paint import name_classes
from remanence.report.tables import MethodRow, lead, percent, rank

MOST_NAMED = 4  # clients named in a sentence on refused replies


def summarise(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    """Sentences about groups and their rows, the most important first."""
    verdict = _compare(rows) if len(rank(rows)) > 1 else _tell(rows)
    return [*verdict, *_explain_choice(rows), *_tell_forgetting(groups, rows), *_tell_unfinished(rows), *_tell_refusals(groups, rows)]


def _tell(rows: Sequence[MethodRow]) -> list[str]:
    """One method alone."""
    row = next((row for row in rows if row.accuracy is not None), None)
    if row is None:
        return ["No round has been evaluated yet, so there is nothing to conclude."]
    worst = f" Its worst class is right {percent(row.worst_class)} % of the time." if row.worst_class is not None else ""
    return [
        f"{row.label} classifies {_amount(row)} of the test set rightly after round {row.last_round}; its best round reached {percent(row.best)} %.{worst}"
    ]


def _compare(rows: Sequence[MethodRow]) -> list[str]:
    """The best against the next."""
    ranked = rank(rows)
    first, second = ranked[:2]
    gap = lead(ranked)
    if gap == 0:
        return [f"{first.label} and {second.label} are level at {_amount(first)} of the test set."]
    said = [
        f"{first.label} is best: it classifies {_amount(first)} of the test set rightly after round {first.last_round}, "
        f"{percent(gap)} points more than the next, {second.label} ({_amount(second)})."
    ]
    if first.deviation is None or second.deviation is None:
        said.append("With a single seed there is no deviation to measure this difference against: it may be chance.")
    elif gap > max(first.deviation, second.deviation):
        said.append("The difference is larger than the deviation over seeds of either.")
    else:
        said.append("The difference is within the deviation over seeds: these runs do not tell the two apart.")
    if len({row.last_round for row in ranked}) > 1:
        ends = ", ".join(f"{row.label} {row.last_round}" for row in ranked)
        said.append(f"Beware: the methods are compared at different rounds ({ends}).")
    return said


def _amount(row: MethodRow) -> str:
    spread = f" ± {percent(row.deviation)}" if row.deviation is not None else ""
    return f"{percent(row.accuracy)}{spread} %"


def _explain_choice(rows: Sequence[MethodRow]) -> list[str]:
    chosen = [f"{row.method} with {row.setting} (of {row.tried})" for row in rows if row.tried > 1]
    return [f"Settings were chosen by validation accuracy, without a look at the test set: {_join(chosen)}."] if chosen else []


def _tell_forgetting(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    told = []
    for group, row in sorted(zip(groups, rows, strict=True), key=lambda pair: pair[1].forgetting or 0.0):
        if row.forgetting is not None:
            hardest = _most_forgotten_class(group) if row.forgetting > 0 else ""
            told.append(f"{row.label} {percent(row.forgetting, 2)} points{hardest}")
    if not told:
        return []
    return [f"From one recorded round to the next a class lost on average, gains not counted: {_join(told)}."]


def _most_forgotten_class(group: Group) -> str:
    """The class with the largest mean drop, over seeds and rounds."""
    curves = [shares for rounds, shares in (class_curve(run) for run in group.runs) if len(rounds) > 1]
    drops = nan_mean(np.concatenate([class_drops(shares) for shares in curves]), axis=0)  # [C]
    names = name_classes(next((run.about["class_names"] for run in group.runs if "class_names" in run.about), []), len(drops))
    worst = int(np.nanargmax(drops))
    return f" (most in class {names[worst]}: {percent(float(drops[worst]), 1)})"


def _tell_unfinished(rows: Sequence[MethodRow]) -> list[str]:
    late = [f"{row.label} ({row.unfinished} of {row.planned} runs)" for row in rows if row.unfinished]
    return [f"Unfinished: {_join(late)}. Their numbers are those of the last recorded round so far."] if late else []


def _tell_refusals(groups: Sequence[Group], rows: Sequence[MethodRow]) -> list[str]:
    told = []
    for group, row in zip(groups, rows, strict=True):
        if row.refused:
            counts: Counter[tuple[int, str]] = sum((refusals(run) for run in group.runs), Counter())
            named = [f"client {client}, {code}, {_times(often)}" for (client, code), often in counts.most_common(MOST_NAMED)]
            more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
            told.append(
                f"{row.label}: {_count(row.refused, 'reply was', 'replies were')} refused ({'; '.join(named)}{more}) and left the model untouched."
            )
        if row.abandoned:
            rounds = sorted({round for run in group.runs for round in abandoned_rounds(run)})
            shown = ", ".join(map(str, rounds[:8])) + (", …" if len(rounds) > 8 else "")
            told.append(
                f"{row.label}: {_count(row.abandoned, 'round was', 'rounds were')} abandoned for want of good replies (round {shown})."
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
