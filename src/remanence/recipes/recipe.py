"""What a recipe is made of. Its form as a file is told in loader.py, which reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remanence.core.errors import InputError

SCALES = ("smoke", "desk", "gpu", "paper")
KINDS = ("table", "figure")
UNITS = ("share", "percent", "rounds", "count")
NEVER = "never"  # a target that was never reached, where smaller numbers are better


class RecipeError(InputError):
    """A recipe file is wrong: a defect of the file, told in one sentence."""


@dataclass(frozen=True)
class PublishedNumber:
    """A number with its deviation over seeds, or words where the paper has words; everything
    None: not there.
    """

    value: float | None = None  # infinite: never reached
    deviation: float | None = None
    text: str = ""

    @property
    def known(self) -> bool:
        return self.value is not None


@dataclass(frozen=True)
class TableLine:
    """A row or a column."""

    label: str
    set: Mapping[str, Any]  # keys of the experiment
    measure: str = ""
    unit: str = ""
    better: str = ""
    ratio: tuple[str, ...] = ()  # instead of runs: the first row in percent of the second
    mean: tuple[str, ...] = ()  # instead of runs: the mean of these rows

    @property
    def sources(self) -> tuple[str, ...]:
        """The rows that this one is made of, where it has no runs of its own."""
        return self.ratio or self.mean


@dataclass(frozen=True)
class RunScale:
    """How an experiment is made smaller."""

    about: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    # "model:resnet18.width" = 16: an option inside an expression
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()  # labels; empty: all
    columns: tuple[str, ...] = ()
    by_row: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_column: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] | None = None
    measure: str = ""
    seeds: int = 1


@dataclass(frozen=True)
class SubstituteDataset:
    """Other data in place of those that cannot be had."""

    about: str
    set: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """One result of one paper."""

    name: str  # wsm/table-3.2
    title: str
    paper: str
    source: str
    kind: str
    measure: str
    unit: str
    better: str  # higher or lower
    experiment: Mapping[str, Any]  # nested, as in an experiment file
    rows: tuple[TableLine, ...]
    columns: tuple[TableLine, ...]
    cells: Mapping[tuple[str, str], Mapping[str, Any]]  # keys of single cells, by row and column
    published: Mapping[tuple[str, str], PublishedNumber]
    claims: tuple[Mapping[str, Any], ...]
    interpretation: tuple[str, ...]
    scales: Mapping[str, RunScale]
    substitutes: Mapping[str, SubstituteDataset]
    grid: Mapping[str, Sequence[Any]]  # keys tried with several values in every cell
    figure_kind: str  # what a figure shows, see figure_data.py
    heading: str  # over the first column

    def unit_of(self, row: TableLine, column: TableLine) -> str:
        return row.unit or column.unit or self.unit

    def better_of(self, row: TableLine, column: TableLine) -> str:
        return row.better or column.better or self.better

    def line(self, label: str) -> TableLine | None:
        return next((line for line in (*self.rows, *self.columns) if line.label == label), None)
