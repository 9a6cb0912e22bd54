"""Groups of runs that differ only in their seed, and their metrics over rounds. Tables, texts and
figures of the report use them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.results.outcome import find_divergence
from remanence.results.run import RUNS, Comparison, Run


def primary_model(run: Run) -> str:
    """The model that a run is evaluated by: "global", or "personal" if every client has its own."""
    return str(run.metadata.get("evaluated") or "global")


T = TypeVar("T")


def cached_per_run(measure: Callable[[Run], T]) -> Callable[[Run], T]:
    """Decorate an expensive measure of a run, so that it is computed once for each `Run` object."""

    @wraps(measure)
    def cached(run: Run) -> T:
        cache, name = vars(run), f"report {measure.__module__}.{measure.__qualname__}"
        if name not in cache:
            cache[name] = measure(run)
        return cast(T, cache[name])

    return cached


@dataclass(frozen=True)
class Group:
    """One method with one setting: runs that differ only in their seed."""

    method: str
    setting: str  # the values of the grid; empty without a grid
    label: str  # its name in a report, unique
    runs: tuple[Run, ...]
    planned: int  # number of seeds, started or not
    home: str = ""  # the name of its folder
    select: str = "all"  # how the comparison selects settings
    condition: str = ""  # the values of the grid that validation data do not select
    variants: int = 1  # number of settings from which this one was selected


def group_runs(results: Sequence[Run | Comparison]) -> list[Group]:
    """Group runs and the runs of comparisons, in the given order. Single runs that differ only in
    their seed become one group.
    """
    groups: list[Group] = []
    places: dict[str, int] = {}  # of the groups that single runs may join, by experiment
    # a folder that is given twice is not two seeds
    unique = {result.folder.resolve(): result for result in results}
    for result in unique.values():
        if isinstance(result, Comparison):
            groups += _split_plan(result)
            continue
        experiment = result.config.model_copy(update={"seed": 0}).model_dump_json()
        if experiment in places:
            old = groups[places[experiment]]
            groups[places[experiment]] = replace(
                old, runs=(*old.runs, result), planned=old.planned + 1
            )
        else:
            places[experiment] = len(groups)
            groups.append(
                Group(
                    result.method,
                    "",
                    result.method,
                    (result,),
                    1,
                    home=result.folder.resolve().name,
                )
            )
    return _label(groups)


def select_by_validation(groups: Sequence[Group]) -> list[Group]:
    """Where a comparison selects by validation, keep of each method, under each condition, the
    setting with the highest validation accuracy; of equal ones the first. A setting that diverged
    is the worst. Nothing is read from the test split.
    """
    kept: list[Group] = []
    for group in groups:
        settings = [
            other
            for other in groups
            if (other.home, other.method, other.condition)
            == (group.home, group.method, group.condition)
        ]
        scores = [validation_accuracy(other.runs) for other in settings]
        known = [score for score in scores if score is not None]
        if group.select != "validation" or len(settings) == 1 or not known:
            kept.append(group)
        elif settings[scores.index(max(known))] is group:
            kept.append(replace(group, variants=len(settings)))
    return kept


def validation_accuracy(runs: Sequence[Run]) -> float | None:
    """The mean over runs at the last recorded round; None where one of them diverged."""
    if any(diverged(run) for run in runs):
        return None
    return mean_of(last_value(run, "accuracy", "valid") for run in runs)


def diverged(run: Run) -> bool:
    """Whether the training diverged, from its replies and its loss on validation data."""
    return find_divergence(run.metrics, run.attackers, "valid") is not None


def _split_plan(comparison: Comparison) -> list[Group]:
    by_folder = {run.folder: run for run in comparison.runs}
    cells: dict[tuple[str, str, str], list[Run | None]] = {}
    for cell in comparison.cells:
        run = by_folder.get(comparison.folder / RUNS / cell["name"])
        key = cell["method"], cell.get("setting", ""), cell.get("condition", "")
        cells.setdefault(key, []).append(run)
    home, select = comparison.folder.resolve().name, comparison.plan.get("select", "all")
    return [
        Group(
            method,
            setting,
            f"{method}, {setting}" if setting else method,
            tuple(run for run in runs if run),
            len(runs),
            home,
            select,
            condition,
        )
        for (method, setting, condition), runs in cells.items()
    ]


def _label(groups: list[Group]) -> list[Group]:
    """Make labels unique by the folder, and by a number if that is not enough."""
    often = Counter(group.label for group in groups)
    named = [
        replace(group, label=f"{group.label} ({group.home})") if often[group.label] > 1 else group
        for group in groups
    ]
    seen: Counter[str] = Counter()
    for place, group in enumerate(named):
        seen[group.label] += 1
        if seen[group.label] > 1:
            named[place] = replace(group, label=f"{group.label} {seen[group.label]}")
    return named


def describe_model(groups: Sequence[Group]) -> str:
    """The primary model of the groups, in words."""
    kinds = {primary_model(run) for group in groups for run in group.runs} or {"global"}
    words = {"global": "the global model", "personal": "the clients' own models"}
    return (
        words[kinds.pop()]
        if len(kinds) == 1
        else "the primary model (the global one, or the clients' own)"
    )


def class_names_of(group: Group) -> list[object]:
    """The class names of the first run that has any."""
    return next(
        (
            list(run.metadata["class_names"])
            for run in group.runs
            if run.metadata.get("class_names")
        ),
        [],
    )


def clusters_of(run: Run) -> np.ndarray | None:
    """The cluster of every client at every time step [T, K]; None without drift."""
    clusters = run.metadata.get("clusters")
    return np.array(clusters, dtype=np.int64) if clusters else None


def step_starts(groups: Sequence[Group]) -> list[int]:
    """The first round of every time step; empty if the runs differ, or without drift."""
    found = {tuple(_starts(run)) for group in groups for run in group.runs}
    return list(found.pop()) if len(found) == 1 else []


def _starts(run: Run) -> list[int]:
    clusters, length = clusters_of(run), run.metadata.get("rounds_per_step")
    if clusters is None or not length:
        return []
    return [1 + step * int(length) for step in range(len(clusters))]


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def metric_curve(run: Run, value: str = "accuracy", split: str = "test") -> dict[int, float]:
    """A metric of the primary model by round."""
    model = primary_model(run)
    lines = (line for line in run.metrics if line["split"] == split and line["model"] == model)
    return {int(line["round"]): float(line[value]) for line in lines if is_number(line.get(value))}


def last_value(run: Run, value: str = "accuracy", split: str = "test") -> float | None:
    """A metric of the primary model at the last recorded round."""
    points = metric_curve(run, value, split)
    return points[max(points)] if points else None


@cached_per_run
def class_curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Test accuracy by class.

    Returns:
        The rounds [T], and accuracies [T, C] with NaN for classes without examples.
    """
    model = primary_model(run)
    lines = [
        line
        for line in run.metrics
        if line["split"] == "test" and line["model"] == model and line.get("per_class")
    ]
    rows = [
        [float(share) if is_number(share) else math.nan for share in line["per_class"]]
        for line in lines
    ]
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0))
    return np.array([line["round"] for line in lines]), np.array(rows)


def mean_class_curve(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """`class_curve` as the mean over the runs that recorded a round."""
    curves = [pair for pair in (class_curve(run) for run in group.runs) if len(pair[0])]
    if not curves:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0))
    rounds = np.unique(np.concatenate([rounds for rounds, _ in curves]))
    stack = np.full((len(curves), len(rounds), curves[0][1].shape[1]), np.nan)
    for place, (when, shares) in enumerate(curves):
        stack[place, np.searchsorted(rounds, when)] = shares
    return rounds, nan_mean(stack, axis=0)


def mean_curve(
    group: Group, points_of: Callable[[Run], dict[int, float]]
) -> tuple[list[int], list[float], list[float | None]]:
    """Mean and standard deviation of a curve over the runs that recorded a round.

    Returns:
        The rounds, the means, and the deviations (None for one run).
    """
    curves = [points_of(run) for run in group.runs]
    rounds = sorted({round for points in curves for round in points})
    values = [[points[round] for points in curves if round in points] for round in rounds]
    return (
        rounds,
        [sum(numbers) / len(numbers) for numbers in values],
        [deviation_of(numbers) for numbers in values],
    )


def mean_of(values: Any) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def deviation_of(values: Any) -> float | None:
    """The sample standard deviation (n - 1); None for fewer than two numbers.

    The squared deviations 4 * 0.0625 over 4 - 1, and the root of 1 / 12:

    >>> deviation_of([0.25, 0.75, 0.25, 0.75])
    0.28867513459481287
    """
    numbers = [value for value in values if value is not None]
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None


def rejections(run: Run) -> Counter[tuple[int, str]]:
    """The number of rejected replies by client and code. The lines of a round, one for each split,
    repeat its rejections, which count once.
    """
    by_round: dict[int, list[dict[str, Any]]] = {}
    for line in run.metrics:
        if len(line.get("rejected") or []) > len(by_round.get(line["round"], [])):
            by_round[line["round"]] = line["rejected"]
    return Counter(
        (int(reply["client"]), str(reply["code"]))
        for replies in by_round.values()
        for reply in replies
    )


def abandonment_reasons(run: Run) -> list[str]:
    """Why rounds were abandoned although enough replies arrived, each reason once."""
    found = [str(line.get("problem") or "") for line in run.metrics if line.get("abandoned")]
    return [reason for reason in dict.fromkeys(found) if reason]


def abandoned_rounds(run: Run) -> list[int]:
    """The rounds that were abandoned."""
    return sorted({int(line["round"]) for line in run.metrics if line.get("abandoned")})
