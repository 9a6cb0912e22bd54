"""The measures of a recipe: functions from the runs of a cell to a mean and deviation over seeds.

Rounds are given as a share of the training (`at=0.7` is round 2800 of 4000), so that a smaller
experiment shows the same point of training; the nearest recorded round is used. Accuracies are
between 0 and 1; `evaluate_cells` converts them to percent where the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from remanence.methods.centralized import EVENTS
from remanence.metrics.convergence import mean_of_last, rounds_to_fractions, time_averaged
from remanence.metrics.convergence import rounds_to as rounds_to_value
from remanence.metrics.convergence import top as best_value
from remanence.metrics.examples import forgettable_examples
from remanence.metrics.forgetting import (
    client_forgetting,
    client_forgetting_rounds,
    forgetting_curve,
    require_every_round,
)
from remanence.metrics.forgetting import local_forgetting as local_forgetting_of
from remanence.metrics.groups import mean_of
from remanence.recipes import drift_measures
from remanence.recipes.cell_evidence import CellEvidence, RecipeMeasure, by_seed
from remanence.recipes.recipe import NEVER, CellNumber
from remanence.results.run import Run


class CentralizedEvents(NamedTuple):
    """Forgetting events between batches of centralized training, summed over the examples of a
    round.
    """

    round: np.ndarray  # [n]
    right_to_wrong: np.ndarray  # [n]
    margin_rise: np.ndarray  # [n]


def accuracy_curve(run: Run, classes: int = 0) -> tuple[list[int], list[float]]:
    """Test accuracy at the recorded rounds.

    Args:
        run: The run.
        classes: Use the mean over the first classes only, this many (test sets are balanced).
            0: all classes.
    """
    if not classes:
        return run.curve()
    rounds, per_class = run.curve(value="per_class")
    values = [mean_of(row[:classes]) for row in per_class]  # type: ignore[index]
    known = [(r, v) for r, v in zip(rounds, values, strict=True) if v is not None]
    return [r for r, _ in known], [v for _, v in known]


def last(*, classes: int = 0) -> RecipeMeasure:
    """Test accuracy at the last recorded round."""
    return by_seed(lambda run: next(iter(accuracy_curve(run, classes)[1][-1:]), None))


def mean_last(*, rounds: int = 100, classes: int = 0) -> RecipeMeasure:
    """Mean of the test accuracies recorded in the last `rounds` rounds."""

    def measure(run: Run) -> float | None:
        when, values = accuracy_curve(run, classes)
        counted = sum(round > run.config.total_rounds - rounds for round in when)
        return mean_of_last(values, max(counted, 1)) if values else None

    return by_seed(measure)


def top(*, classes: int = 0) -> RecipeMeasure:
    """Highest test accuracy of all recorded rounds."""
    return by_seed(lambda run: best_value(accuracy_curve(run, classes)[1]))


def average(*, classes: int = 0) -> RecipeMeasure:
    """Mean test accuracy over all rounds."""
    return by_seed(lambda run: time_averaged(*accuracy_curve(run, classes)))


def rounds_to(*, fraction: float = 1.0, of: float = 0.95, target: float = 0.0) -> RecipeMeasure:
    """Rounds to a fraction of a target accuracy. It is the same for all methods of a column:
    `target` or, without it, `of` times the best accuracy that any of them reached.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        curves = {label: mean_curve(runs) for label, runs in evidence.column_runs.items() if runs}
        curves["itself"] = rounds, values = mean_curve(evidence.runs)
        if not rounds:
            return CellNumber()
        reached = (
            rounds_to_value(rounds, values, fraction * target)
            if target
            else rounds_to_fractions(curves, (fraction,), of).rounds["itself"][0]
        )
        return CellNumber(math.inf, None, NEVER) if reached is None else CellNumber(float(reached))

    return measure


def share_ahead(*, of: str) -> RecipeMeasure:
    """Share of the recorded rounds in which the test accuracy, mean over seeds, is higher than that
    of the row `of` in the same column.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        own, other = (
            dict(zip(*mean_curve(runs), strict=True))
            for runs in (evidence.runs, evidence.column_runs.get(of, ()))
        )
        both = own.keys() & other.keys()
        return CellNumber(mean_of([float(own[round] > other[round]) for round in both]))

    return measure


def lead_growth() -> RecipeMeasure:
    """How much the lead in test accuracy over the best other row of the column grows under drift:
    its mean at the ends of the later half of the time steps minus that of the earlier half.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        own = _step_ends(evidence.runs)
        rivals = [runs for runs in evidence.column_runs.values() if runs and runs != evidence.runs]
        best = [max(values) for values in zip(*map(_step_ends, rivals), strict=False)]
        leads = [value - other for value, other in zip(own, best, strict=False)]
        half = len(leads) // 2
        if not half:
            return CellNumber()
        return CellNumber(sum(leads[-half:]) / half - sum(leads[:half]) / half)

    return measure


def _step_ends(runs: Sequence[Run]) -> list[float]:
    """The mean test accuracy at the end of every time step that all runs have reached."""
    curve = dict(zip(*mean_curve(runs), strict=True))
    return [value for round, value in curve.items() if round % runs[0].config.rounds == 0]


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Mean over seeds of the test accuracy, at the rounds that all of them recorded."""
    curves = [dict(zip(*run.curve(), strict=True)) for run in runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return rounds, [sum(curve[round] for curve in curves) / len(curves) for round in rounds]


def nearest_round(known: Sequence[int], at: float, total: int) -> int:
    """The recorded round nearest to a share of the training; of two, the later one.

    >>> nearest_round([1, 5, 10], 0.7, 10), nearest_round([1, 5, 10], 0.0, 10)
    (5, 1)
    """
    return min(known, key=lambda round: (abs(round - max(1.0, at * total)), -round))


def forgettable(*, at: float = 1.0, client: int = 0) -> RecipeMeasure:
    """Number of examples of a client that its local model classifies correctly and the new global
    model does not (FedWAvg).
    """

    def measure(run: Run) -> float | None:
        if run.examples is None:
            return None
        found = forgettable_examples(run.examples)
        known = np.unique(found.round).tolist()
        if not known:
            return None
        here = (found.round == nearest_round(known, at, run.config.total_rounds)) & (
            found.client == client
        )
        return float(found.count[here][0]) if here.any() else None

    return by_seed(measure)


def forgetting_events() -> RecipeMeasure:
    """Number of forgetting events in the whole training: between batches in centralized training,
    by aggregation in federated training.
    """

    def measure(run: Run) -> float | None:
        require_every_round(run, "forgetting_events")
        counted = centralized_events(run)
        if counted is not None:
            return float(counted.right_to_wrong.sum())
        return (
            None if run.examples is None else float(forgettable_examples(run.examples).count.sum())
        )

    return by_seed(measure)


def centralized_events(run: Run) -> CentralizedEvents | None:
    """The events that the method `centralized` counted (FedWAvg, table 1), by round; None for a
    run that counted none.
    """
    rounds: dict[int, tuple[int, ...]] = {}
    columns = [f"centralized.{name}" for name in EVENTS]
    for line in run.metrics:
        payload = line.get("payload") or {}
        if all(column in payload for column in columns):
            rounds[int(line["round"])] = tuple(int(payload[column]) for column in columns)
    if not rounds:
        return None
    counts = np.array([rounds[round] for round in sorted(rounds)])
    return CentralizedEvents(np.array(sorted(rounds)), *counts.T)


def client_forgetting_mean(*, at: float = 1.0) -> RecipeMeasure:
    """Accuracy lost on the other clients' data in the local training of a round: the mean of F_k
    over the models of the round (WSM, eq. 12). Positive: forgotten.
    """

    def measure(run: Run) -> float | None:
        known = client_forgetting_rounds(run.ledger)
        if not known:
            return None
        found = client_forgetting(
            run.ledger, nearest_round(known, at, run.config.total_rounds)
        ).mean
        return float(np.nanmean(found)) if not np.isnan(found).all() else None

    return by_seed(measure)


def global_forgetting() -> RecipeMeasure:
    """Round-wise forgetting of the global model, mean over rounds (Flashback)."""

    def measure(run: Run) -> float | None:
        require_every_round(run, "global_forgetting")
        return mean_of(forgetting_curve(run).values())

    return by_seed(measure)


def local_forgetting() -> RecipeMeasure:
    """Forgetting of local training, mean over the recorded local models (Flashback)."""

    def measure(run: Run) -> float | None:
        values = local_forgetting_of(run.ledger).value
        return float(np.nanmean(values)) if len(values) and not np.isnan(values).all() else None

    return by_seed(measure)


def classes_held() -> RecipeMeasure:
    """Number of classes of a client, mean over clients."""
    return by_seed(lambda run: float(_has_class(run).sum(axis=1).mean()))


def holders_of_all() -> RecipeMeasure:
    """Share of the clients that have every class."""
    return by_seed(lambda run: float(_has_class(run).all(axis=1).mean()))


def distance_in_rounds(*, target: float, published: str) -> RecipeMeasure:
    """How far the rounds to three quarters, nine tenths and all of a target accuracy are from
    published ones: the mean of |log2(ours / published)|, so 1 is a factor of two. An accuracy that
    is never reached counts as twice the length of the training.

    Args:
        target: The target accuracy.
        published: The three numbers of rounds, such as '112, 190, 445'.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        rounds, values = mean_curve(evidence.runs)
        if not rounds:
            return CellNumber()
        never = 2 * evidence.runs[0].config.total_rounds
        ours = [rounds_to_value(rounds, values, part * target) or never for part in (0.75, 0.9, 1)]
        wanted = [float(number) for number in published.split(",")]
        return CellNumber(mean_of(abs(math.log2(a / b)) for a, b in zip(ours, wanted, strict=True)))

    return measure


def best_over(*, rounds: int = 0) -> RecipeMeasure:
    """Best accuracy of all settings of the grid (means over seeds), with the best setting. With
    `rounds`, accuracies are means of the last rounds as in `mean_last`.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        scores = _scores(evidence, rounds)
        if not scores:
            return CellNumber()
        best = max(scores, key=lambda setting: scores[setting])
        return CellNumber(scores[best], None, f"{scores[best]:.3f} ({_value(best)})")

    return measure


def within_best(*, points: float = 2.0, rounds: int = 0) -> RecipeMeasure:
    """The settings of the grid within `points` percentage points of the best, and their number."""

    def measure(evidence: CellEvidence) -> CellNumber:
        scores = _scores(evidence, rounds)
        if not scores:
            return CellNumber()
        best = max(scores.values())
        close = [
            _value(setting)
            for setting, score in scores.items()
            if score >= best - points / 100 - 1e-12
        ]
        return CellNumber(float(len(close)), None, ", ".join(close))

    return measure


def _has_class(run: Run) -> np.ndarray:
    return np.asarray(run.metadata["label_counts"]) > 0


def _scores(evidence: CellEvidence, rounds: int) -> dict[str, float]:
    score = mean_last(rounds=rounds) if rounds else last()
    found = {
        setting: score(CellEvidence(runs, {}, ())).value
        for setting, runs in evidence.variants
        if runs
    }
    return {setting: value for setting, value in found.items() if value is not None}


def _value(setting: str) -> str:
    return setting.partition("=")[2]


# measures that compare every round with the one before: a run must record every round
FROM_ROUND_TO_ROUND = ("forgetting_events", "global_forgetting")

MEASURES: dict[str, Callable[..., RecipeMeasure]] = {
    "average": average,
    "best_over": best_over,
    "classes_held": classes_held,
    "client_forgetting": client_forgetting_mean,
    "cluster_share_range": drift_measures.cluster_share_range,
    "convergence": drift_measures.convergence,
    "convergence_as_printed": drift_measures.convergence_as_printed,
    "distance_in_rounds": distance_in_rounds,
    "forgettable": forgettable,
    "forgetting_events": forgetting_events,
    "global_forgetting": global_forgetting,
    "holders_of_all": holders_of_all,
    "last": last,
    "lead_growth": lead_growth,
    "local_forgetting": local_forgetting,
    "mean_last": mean_last,
    "performance": drift_measures.performance,
    "performance_as_printed": drift_measures.performance_as_printed,
    "robustness": drift_measures.robustness,
    "robustness_as_printed": drift_measures.robustness_as_printed,
    "rounds_to": rounds_to,
    "share_ahead": share_ahead,
    "top": top,
    "within_best": within_best,
}
