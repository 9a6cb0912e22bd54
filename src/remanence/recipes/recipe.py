"""The dataclasses of a recipe. `loader` describes the TOML file and reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remanence.core.errors import InputError

SCALES = ("smoke", "desk", "gpu", "paper")
KINDS = ("table", "figure", "calibration")
UNITS = ("share", "percent", "rounds", "count")
NEVER = "never"  # in place of a number of rounds: the target was not reached


class RecipeError(InputError):
    """A recipe file is invalid."""


@dataclass(frozen=True)
class CellNumber:
    """What a cell shows, published or ours: a number with its standard deviation, over seeds unless
    the measure says otherwise, or a text. Without either the cell is empty.
    """

    value: float | None = None  # infinite: the target was not reached
    deviation: float | None = None
    text: str = ""

    @property
    def known(self) -> bool:
        return self.value is not None


@dataclass(frozen=True)
class TableLine:
    """A row or a column of a table."""

    label: str
    set: Mapping[str, Any]  # settings of the experiment, by dotted key
    measure: str = ""
    unit: str = ""
    better: str = ""
    ratio: tuple[str, ...] = ()  # labels of two rows: the first in percent of the second
    mean: tuple[str, ...] = ()  # labels of rows: their mean

    @property
    def sources(self) -> tuple[str, ...]:
        """The labels of the rows from which this one is computed; empty where it has runs."""
        return self.ratio or self.mean


@dataclass(frozen=True)
class RunScale:
    """A smaller version of the experiment."""

    description: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    # options inside expressions, such as "model:resnet18.width" = 16
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
    """Other data in place of a missing dataset."""

    description: str
    set: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """One table or figure of one paper."""

    name: str  # wsm/table-3.2
    title: str
    paper: str
    source: str
    kind: str
    measure: str
    unit: str
    better: str  # "higher" or "lower"
    experiment: Mapping[str, Any]  # nested, as in an experiment file
    rows: tuple[TableLine, ...]
    columns: tuple[TableLine, ...]
    cells: Mapping[tuple[str, str], Mapping[str, Any]]  # settings of single cells
    published: Mapping[tuple[str, str], CellNumber]
    claims: tuple[Mapping[str, Any], ...]
    interpretation: tuple[str, ...]
    scales: Mapping[str, RunScale]
    substitutes: Mapping[str, SubstituteDataset]
    grid: Mapping[str, Sequence[Any]]  # settings with the values that every cell tries
    figure_kind: str  # one of figure_data.KINDS; empty for tables
    heading: str  # of the first column

    def unit_of(self, row: TableLine, column: TableLine) -> str:
        return row.unit or column.unit or self.unit

    def better_of(self, row: TableLine, column: TableLine) -> str:
        return row.better or column.better or self.better

    def line(self, label: str) -> TableLine | None:
        return next((line for line in (*self.rows, *self.columns) if line.label == label), None)
