"""What a measure of a recipe sees of a cell, and its number from those of single runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from remanence.metrics.groups import deviation_of, mean_of
from remanence.recipes.recipe import CellNumber
from remanence.results.run import Run


@dataclass(frozen=True)
class CellEvidence:
    """The finished runs of a cell, and of the cells it is compared with."""

    runs: tuple[Run, ...]  # one for each seed
    column_runs: Mapping[str, tuple[Run, ...]]  # of all cells in this column, by row
    variants: tuple[tuple[str, tuple[Run, ...]], ...]  # for every setting of the recipe's grid


RecipeMeasure = Callable[[CellEvidence], CellNumber]


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
