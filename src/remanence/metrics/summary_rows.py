"""The rows of a report's tables and of `results.csv`: one for every method and setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import drift_of, local_forgetting_of
from remanence.metrics.drift import worst_client_curve
from remanence.metrics.forgetting import forgetting_curve
from remanence.metrics.groups import (
    Group,
    abandoned_rounds,
    class_curve,
    deviation_of,
    is_number,
    last_value,
    mean_of,
    metric_curve,
    rejections,
)
from remanence.metrics.seed_noise import is_above
from remanence.results.run import Run


@dataclass(frozen=True)
class MethodRow:
    """The numbers of a method with a setting: means over seeds, of the primary model. Accuracies
    are between 0 and 1.
    """

    label: str
    method: str
    setting: str
    variants: int  # number of settings from which validation accuracy selected this one
    seeds: int  # with at least one recorded round
    planned: int  # number of seeds
    accuracy: float | None  # on the test set, at the last recorded round
    deviation: float | None  # sample standard deviation over seeds; None for one seed
    best: float | None  # test accuracy at the best round of each seed
    macro_f1: float | None
    worst_class: float | None  # the lowest accuracy of any class
    forgetting: float | None  # mean round-wise forgetting
    validation: float | None  # accuracy at the last recorded round
    bytes_per_round: float | None  # up and down together
    seconds_per_round: float | None
    rejected: int  # replies, over all seeds
    abandoned: int  # rounds, over all seeds
    unfinished: int  # seeds that have not reached the last round
    last_round: int | None  # the last recorded round; the earliest if seeds differ
    # The following are None if a run did not record them. Those of drift are defined in
    # metrics/drift.py.
    local_forgetting: float | None = None  # mean over recorded local models
    performance: float | None = None  # accuracy at the ends of time steps
    convergence: float | None = None  # rounds to 90 % of the gain of a time step
    robustness: float | None = None  # largest accuracy drop after a drift
    time_averaged: float | None = None  # accuracy over all rounds
    recovery: float | None = None  # rounds back to the accuracy before a drift
    never_recovered: float | None = None  # share of clients and drifts
    worst_client: float | None = None  # accuracy at the last recorded round
    bottom_decile: float | None = None
    previous_concepts: float | None = None  # forgetting of previous concepts
    same_cluster: float | None = None  # share of used peers, mean over rounds
    by_seed: tuple[tuple[int, float], ...] = ()  # seed and accuracy, as the mean in `accuracy`
    learned_nothing: int = 0  # seeds whose model is the untrained one


def make_row(group: Group) -> MethodRow:
    """Compute the row of a group."""
    runs = [run for run in group.runs if run.metrics]
    final = [last_value(run) for run in runs]
    evaluated = [metric_curve(run) for run in runs]
    ends = [max(points) for points in evaluated if points]
    lost = [list(forgetting_curve(run).values()) for run in runs]
    return MethodRow(
        label=group.label,
        method=group.method,
        setting=group.setting,
        variants=group.variants,
        seeds=len(runs),
        planned=group.planned,
        accuracy=mean_of(final),
        deviation=deviation_of(final),
        best=mean_of(max(points.values()) if points else None for points in evaluated),
        macro_f1=mean_of(last_value(run, "macro_f1") for run in runs),
        worst_class=mean_of(_worst_class(run) for run in runs),
        forgetting=mean_of(mean_of(losses) for losses in lost),
        validation=mean_of(last_value(run, split="valid") for run in runs),
        bytes_per_round=mean_of(_per_round(run, "bytes_up", "bytes_down") for run in runs),
        seconds_per_round=mean_of(_per_round(run, "seconds") for run in runs),
        rejected=sum(rejections(run).total() for run in runs),
        abandoned=sum(len(abandoned_rounds(run)) for run in runs),
        unfinished=group.planned - sum(run.finished for run in runs),
        last_round=min(ends) if ends else None,
        local_forgetting=_mean_number(
            float(nan_mean(found.value))
            for run in runs
            if (found := local_forgetting_of(run)) is not None
        ),
        worst_client=mean_of(_worst_client(run) for run in runs),
        bottom_decile=mean_of(last_value(run, "bottom_decile") for run in runs),
        same_cluster=mean_of(
            mean_of(metric_curve(run, "same_cluster_share").values()) for run in runs
        ),
        by_seed=tuple(
            (run.config.seed, value)
            for run, value in zip(runs, final, strict=True)
            if value is not None
        ),
        learned_nothing=sum(not run.learned for run in runs),
        **_measure_drift(runs),
    )


def _measure_drift(runs: Sequence[Run]) -> dict[str, float | None]:
    """The numbers of runs with drift; None for others."""
    found = [pair[1] for run in runs if (pair := drift_of(run)) is not None]
    return {
        "performance": _mean_number(summary.performance for summary in found),
        "convergence": _mean_number(summary.convergence.mean for summary in found),
        "robustness": _mean_number(summary.robustness for summary in found),
        "time_averaged": _mean_number(summary.time_averaged for summary in found),
        "recovery": _mean_number(summary.recovery.mean for summary in found),
        "never_recovered": _mean_number(
            summary.recovery.without / max(summary.recovery.rounds.size, 1) for summary in found
        ),
        "previous_concepts": _mean_number(summary.concept_forgetting for summary in found),
    }


def _mean_number(values: Iterable[float]) -> float | None:
    """The mean of the values that are not NaN."""
    return mean_of(value for value in values if not math.isnan(value))


def _worst_client(run: Run) -> float | None:
    """The recorded value; otherwise, if clients share a model and differ only by their cluster,
    from the drift curves.
    """
    recorded, found = last_value(run, "worst_client"), drift_of(run)
    if recorded is not None or found is None:
        return recorded
    value = float(worst_client_curve(found[0])[-1])
    return None if math.isnan(value) else value


def _worst_class(run: Run) -> float | None:
    rounds, shares = class_curve(run)
    known = shares[-1][~np.isnan(shares[-1])] if len(rounds) else np.zeros(0)
    return float(known.min()) if known.size else None


def _per_round(run: Run, *values: str) -> float | None:
    """The mean over rounds of a sum of values, which all lines of a round repeat."""
    rounds = {
        line["round"]: sum(line[value] for value in values)
        for line in run.metrics
        if all(is_number(line.get(value)) for value in values)
    }
    return mean_of(rounds.values())


def rank(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """Sort the rows that have a test accuracy, the highest first."""
    return sorted(
        (row for row in rows if row.accuracy is not None), key=lambda row: -(row.accuracy or 0.0)
    )


def best_row(rows: Sequence[MethodRow]) -> MethodRow | None:
    """The row whose test accuracy at the last recorded round is highest, where the seeds separate
    it from every other row; None where they do not, and for a single row.
    """
    ranked = rank(rows)
    return ranked[0] if len(ranked) > 1 and not not_separated(ranked) else None


def not_separated(ranked: Sequence[MethodRow]) -> list[MethodRow]:
    """The rows below the first that the seeds do not separate from it: the 95 % interval of the
    paired differences of their seeds, adjusted for the number of rows, contains 0, or there are
    fewer than two common seeds.
    """
    first, others = ranked[0], ranked[1:]
    best = dict(first.by_seed)
    return [row for row in others if not is_above(best, dict(row.by_seed), len(others))]


def margin(ranked: Sequence[MethodRow]) -> float:
    """By how much the first is above the second; 0 if only rounding separates them."""
    gap = (ranked[0].accuracy or 0.0) - (ranked[1].accuracy or 0.0)
    return gap if gap > 1e-9 else 0.0
