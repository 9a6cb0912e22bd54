"""Phrases that the report's summary and `remanence diagnose` share, so that both state the same
fact in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from remanence.metrics.cached import class_losses, phase_means
from remanence.metrics.group_stats import forgetting_by_class
from remanence.metrics.groups import Group, class_names_of, deviation_of, mean_of
from remanence.metrics.summary_rows import MethodRow
from remanence.reports.table_columns import percent
from remanence.reports.theme import name_classes

NAMED = 3  # classes and clients named in a sentence
# the subject of `describe_class_forgetting`
CLASS_FORGETTING = (
    "Accuracy that a class loses from one recorded round to the next, on average (gains count as 0)"
)
PHASE_WORDS = {
    "drift": "data drift",
    "mixing": "peer averaging",
    "local": "local training",
    "aggregation": "aggregation",
    "server": "server training",
}
# the subject of `describe_phases`
PHASE_CHANGES = "Change of accuracy in an average round, in points averaged over classes"


def join_words(parts: Iterable[str]) -> str:
    """A list in a sentence.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    texts = list(parts)
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1] if texts else ""]))


def count_of(number: int, one: str, many: str) -> str:
    """A number with its noun.

    >>> count_of(1, "round was", "rounds were"), count_of(3, "round was", "rounds were")
    ('1 round was', '3 rounds were')
    """
    return f"{number} {one if number == 1 else many}"


def with_deviation(values: Sequence[float], digits: int = 1) -> str:
    """The mean over seeds, with the standard deviation where there are several.

    >>> with_deviation([0.25]), with_deviation([0.25, 0.75])
    ('25.0', '50.0 ± 35.4')
    """
    deviation = deviation_of(values)
    spread = f" ± {percent(deviation, digits)}" if deviation is not None else ""
    return percent(mean_of(values), digits) + spread


def label_classes(group: Group, count: int) -> list[str]:
    """A name for each class that reads well in a sentence: `class 3`, never a bare number."""
    names = name_classes(class_names_of(group), count)
    return [f"class {name}" if name.isdigit() else name for name in names]


def largest_losses(group: Group, losses: np.ndarray, most: int = NAMED) -> dict[str, float]:
    """The classes with the largest positive losses [C], by name."""
    names = label_classes(group, len(losses))
    order = np.argsort(-np.nan_to_num(losses, nan=-np.inf), kind="stable")
    return {names[index]: float(losses[index]) for index in order[:most] if losses[index] > 0}


def list_losses(losses: dict[str, float]) -> str:
    """Names with their losses in points, in a sentence.

    >>> list_losses({"cat": 0.2, "dog": 0.125})
    'cat (20.0) and dog (12.5)'
    """
    return join_words(f"{name} ({percent(loss)})" for name, loss in losses.items())


def describe_class_forgetting(group: Group, forgetting: float | None) -> str:
    """The value that `CLASS_FORGETTING` names, such as `0.39 points, most in cat (1.2)`."""
    worst = largest_losses(group, forgetting_by_class(group))
    return f"{percent(forgetting, 2)} points" + (f", most in {list_losses(worst)}" if worst else "")


def describe_change(losses: Sequence[float]) -> str:
    """A loss, or a gain, from its values over seeds.

    >>> describe_change([0.2]), describe_change([-0.1]), describe_change([0.0])
    ('loses 20.0', 'gains 10.0', 'changes nothing')
    """
    mean = mean_of(losses) or 0.0
    if abs(mean) < 0.0005:
        return "changes nothing"
    sign = 1 if mean > 0 else -1
    return f"{'loses' if mean > 0 else 'gains'} {with_deviation([sign * loss for loss in losses])}"


def describe_phases(group: Group) -> str:
    """The values that `PHASE_CHANGES` names: what each phase of a round loses or gains."""
    return join_words(
        f"{PHASE_WORDS[phase]} {describe_change(values)}"
        for phase, values in phase_means(group).items()
    )


def describe_worst_phase(group: Group, phase: str) -> str:
    """Such as `most is lost in local training, above all of cat (20.0)`."""
    classes = list_losses(largest_losses(group, class_losses(group)[phase]))
    return f"most is lost in {PHASE_WORDS[phase]}" + (
        f", above all of {classes}" if classes else ""
    )


def describe_drop(drop: float) -> str:
    """What the accuracy of clients does after a drift: its lowest point against the end of the
    time step before.

    >>> describe_drop(0.25), describe_drop(-0.032)
    ('fall by 25.0 points at worst', 'stay at least 3.2 points above their accuracy before it')
    """
    if drop > 0:
        return f"fall by {percent(drop)} points at worst"
    return f"stay at least {percent(-drop)} points above their accuracy before it"


def list_warnings(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before the numbers: which runs learned nothing, and which diverged.

    The seeds of a method that share a warning are named together.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        for run in group.runs:
            for text in run.warnings:
                found.setdefault((group.label, text), []).append(str(run.config.seed))
    several = {group.label for group in groups if group.planned > 1}
    return [
        f"{label}{f' (seed {join_words(seeds)})' if label in several else ''} {text}"
        for (label, text), seeds in found.items()
    ]


def describe_unfinished(row: MethodRow) -> str:
    """Such as `1 of 3 runs is unfinished`; empty where all have ended."""
    if not row.unfinished:
        return ""
    return f"{row.unfinished} of {count_of(row.planned, 'run', 'runs')} " + (
        "is unfinished" if row.unfinished == 1 else "are unfinished"
    )


def describe_rejected(row: MethodRow) -> str:
    """How many replies were rejected; empty where none was."""
    return count_of(row.rejected, "reply was", "replies were") + " rejected" if row.rejected else ""


def describe_abandoned(row: MethodRow) -> str:
    """How many rounds were abandoned; empty where none was."""
    if not row.abandoned:
        return ""
    return count_of(row.abandoned, "round was", "rounds were") + " abandoned"
