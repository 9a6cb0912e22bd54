"""The measures of a recipe: functions from the runs of a cell to a mean and deviation over seeds.

Rounds are given as a share of the training (`at=0.7` is round 2800 of 4000), so that a smaller
experiment shows the same point of training; the nearest recorded round is used. Accuracies are
between 0 and 1; `evaluate_cells` converts them to percent where the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from remanence.methods.centralized import EVENTS
from remanence.metrics.convergence import mean_of_last, rounds_to_fractions, time_averaged
from remanence.metrics.convergence import top as best_value
from remanence.metrics.drift import summarize_drift
from remanence.metrics.drift_as_printed import (
    drops,
    end_accuracies,
    rounds_to_gain,
    validation_curve,
)
from remanence.metrics.examples import forgettable_examples
from remanence.metrics.forgetting import (
    client_forgetting,
    client_forgetting_rounds,
    forgetting_curve,
)
from remanence.metrics.forgetting import local_forgetting as local_forgetting_of
from remanence.metrics.groups import deviation_of, mean_of
from remanence.recipes.recipe import NEVER, CellNumber
from remanence.results.run import Run


@dataclass(frozen=True)
class CellEvidence:
    """The finished runs of a cell, and of the cells it is compared with."""

    runs: tuple[Run, ...]  # one for each seed
    column_runs: Mapping[str, tuple[Run, ...]]  # of all cells in this column, by row
    variants: tuple[tuple[str, tuple[Run, ...]], ...]  # for every setting of the recipe's grid


RecipeMeasure = Callable[[CellEvidence], CellNumber]


class CentralizedEvents(NamedTuple):
    """Forgetting events between batches of centralized training, summed over the examples of a
    round.
    """

    round: np.ndarray  # [n]
    right_to_wrong: np.ndarray  # [n]
    margin_rise: np.ndarray  # [n]


def by_seed(measure: Callable[[Run], float | None]) -> RecipeMeasure:
    """Turn a measure of one run into its mean and deviation over seeds."""

    def over_seeds(evidence: CellEvidence) -> CellNumber:
        return summarize_seeds(measure(run) for run in evidence.runs)

    return over_seeds


def summarize_seeds(values: Iterable[float | None]) -> CellNumber:
    """Mean and sample standard deviation of the values that are known.

    >>> summarize_seeds([1.0, 3.0, None])
    CellNumber(value=2.0, deviation=1.4142135623730951, text='')
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    return CellNumber(mean_of(known), deviation_of(known))


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


def rounds_to(*, fraction: float = 1.0, of: float = 0.95) -> RecipeMeasure:
    """Rounds to a fraction of the target. The target is the same for all methods of a column: `of`
    times the best accuracy that any of them reached.
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        curves = {label: mean_curve(runs) for label, runs in evidence.column_runs.items() if runs}
        curves["itself"] = mean_curve(evidence.runs)
        if not curves["itself"][0]:
            return CellNumber()
        reached = rounds_to_fractions(curves, (fraction,), of).rounds["itself"][0]
        return CellNumber(math.inf, None, NEVER) if reached is None else CellNumber(float(reached))

    return measure


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
    return by_seed(lambda run: mean_of(forgetting_curve(run).values()))


def local_forgetting() -> RecipeMeasure:
    """Forgetting of local training, mean over the recorded local models (Flashback)."""

    def measure(run: Run) -> float | None:
        values = local_forgetting_of(run.ledger).value
        return float(np.nanmean(values)) if len(values) and not np.isnan(values).all() else None

    return by_seed(measure)


def performance() -> RecipeMeasure:
    """Accuracy at the end of each time step (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).performance)


def convergence() -> RecipeMeasure:
    """Rounds to 90 % of the accuracy gain of a time step (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).convergence.mean)


def robustness() -> RecipeMeasure:
    """Largest accuracy drop right after a drift (HAST, section 3.5)."""
    return by_seed(lambda run: summarize_drift(run).robustness)


def performance_as_printed() -> RecipeMeasure:
    """Accuracy at the end of each time step, with its deviation over time steps (HAST, table
    A.8).
    """

    def measure(evidence: CellEvidence) -> CellNumber:
        return summarize_steps(end_accuracies(evidence.runs)) if evidence.runs else CellNumber()

    return measure


def convergence_as_printed() -> RecipeMeasure:
    """Rounds to 90% of a time step's gain, of the mean over clients and seeds (HAST, table A.8)."""
    return by_time_step(rounds_to_gain)


def robustness_as_printed() -> RecipeMeasure:
    """The end of a time step minus its lowest accuracy, of the mean over clients and seeds (HAST,
    table A.8).
    """
    return by_time_step(drops)


def by_time_step(measure: Callable[[np.ndarray], np.ndarray]) -> RecipeMeasure:
    """Turn a measure of a curve [T, R] into its mean and deviation over time steps."""

    def over_steps(evidence: CellEvidence) -> CellNumber:
        curve = validation_curve(evidence.runs)
        return CellNumber() if curve is None else summarize_steps(measure(curve))

    return over_steps


def summarize_steps(values: np.ndarray) -> CellNumber:
    """Mean and deviation over time steps. The printed deviations are those of all time steps, not
    of a sample of them.

    >>> summarize_steps(np.array([1.0, 3.0]))
    CellNumber(value=2.0, deviation=1.0, text='')
    """
    return CellNumber(float(values.mean()), float(values.std())) if len(values) else CellNumber()


def classes_held() -> RecipeMeasure:
    """Number of classes of a client, mean over clients."""
    return by_seed(lambda run: float(_has_class(run).sum(axis=1).mean()))


def holders_of_all() -> RecipeMeasure:
    """Share of the clients that have every class."""
    return by_seed(lambda run: float(_has_class(run).all(axis=1).mean()))


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


MEASURES: dict[str, Callable[..., RecipeMeasure]] = {
    "average": average,
    "best_over": best_over,
    "classes_held": classes_held,
    "client_forgetting": client_forgetting_mean,
    "convergence": convergence,
    "convergence_as_printed": convergence_as_printed,
    "forgettable": forgettable,
    "forgetting_events": forgetting_events,
    "global_forgetting": global_forgetting,
    "holders_of_all": holders_of_all,
    "last": last,
    "local_forgetting": local_forgetting,
    "mean_last": mean_last,
    "performance": performance,
    "performance_as_printed": performance_as_printed,
    "robustness": robustness,
    "robustness_as_printed": robustness_as_printed,
    "rounds_to": rounds_to,
    "top": top,
    "within_best": within_best,
}
