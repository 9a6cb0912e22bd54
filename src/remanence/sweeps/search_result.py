"""What a search tried and found, read from the folder of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError
from remanence.metrics.groups import (
    deviation_of,
    diverged,
    group_runs,
    last_value,
    select_by_validation,
    validation_accuracy,
)
from remanence.metrics.seed_noise import is_above
from remanence.results.run import SEARCH, Comparison


@dataclass(frozen=True)
class TriedValue:
    """A value and its results on validation data, in the last recorded round."""

    value: float
    stage: str  # half, beyond (the first range) or quarter
    accuracy: float | None  # mean over seeds; None where a seed diverged, and before it has run
    deviation: float | None  # sample standard deviation over seeds; None for one seed
    by_seed: Mapping[int, float]
    diverged: bool


@dataclass(frozen=True)
class SearchResult:
    """A finished or unfinished search.

    Args:
        comparison: Its runs, as `rem.load` reads their folder.
    """

    comparison: Comparison

    @property
    def folder(self) -> Path:
        """The folder of the search, which `rem.load` and `remanence report` open."""
        return self.comparison.folder

    @property
    def key(self) -> str:
        """The setting, by its dotted key."""
        return str(self._table["key"])

    @property
    def around(self) -> float:
        """The guess."""
        guess: float = self._table["around"]
        return guess

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The values with their stages, as the plan lists them."""
        return list(self._table["tried"])

    @property
    def _table(self) -> dict[str, Any]:
        if SEARCH not in self.comparison.plan:
            raise InputError(f"{self.folder} is a comparison, not a search: read it with rem.load")
        return dict(self.comparison.plan[SEARCH])

    @cached_property
    def tried(self) -> list[TriedValue]:
        """Every value that was tried, in increasing order."""
        groups = {group.setting: group for group in group_runs([self.comparison])}
        found = []
        for entry in self.entries:
            runs = groups[entry["setting"]].runs
            scores = {run.config.seed: last_value(run, split="valid") for run in runs}
            by_seed = {seed: score for seed, score in scores.items() if score is not None}
            found.append(
                TriedValue(
                    entry["value"],
                    entry["stage"],
                    validation_accuracy(runs),
                    deviation_of(list(by_seed.values())),
                    by_seed,
                    any(map(diverged, runs)),
                )
            )
        return sorted(found, key=lambda tried: tried.value)

    @cached_property
    def best(self) -> float | None:
        """The value with the highest validation accuracy; None where every value diverged."""
        chosen = {group.setting for group in select_by_validation(group_runs([self.comparison]))}
        values = {entry["value"] for entry in self.entries if entry["setting"] in chosen}
        known = [t.value for t in self.tried if t.value in values and t.accuracy is not None]
        return known[0] if known else None

    @property
    def edge(self) -> str:
        """Whether the best value is the smallest or the largest one that was tried; else empty."""
        values = [tried.value for tried in self.tried]
        ends = {values[-1]: "largest", values[0]: "smallest"}
        return "" if self.best is None else ends.get(self.best, "")

    @property
    def not_separated(self) -> list[float]:
        """The neighbors of the best value that the seeds do not separate from it."""
        place = next((i for i, t in enumerate(self.tried) if t.value == self.best), None)
        if place is None:
            return []
        around = [i for i in (place - 1, place + 1) if 0 <= i < len(self.tried)]
        neighbors = [self.tried[i] for i in around if not self.tried[i].diverged]
        ours = self.tried[place].by_seed
        return [n.value for n in neighbors if not is_above(ours, n.by_seed, len(neighbors))]

    @property
    def learned(self) -> bool:
        """Whether there is a best value, and no run of it learned nothing."""
        chosen = select_by_validation(group_runs([self.comparison]))
        return self.best is not None and all(run.learned for group in chosen for run in group.runs)

    def describe(self) -> str:
        """The result in a sentence."""
        if self.best is None and any(tried.diverged for tried in self.tried):
            return f"no value of {self.key} trained without diverging: try a lower guess"
        if self.best is None:
            return f"no value of {self.key} has validation results yet"
        found = next(tried for tried in self.tried if tried.value == self.best)
        seeds = len(found.by_seed)
        text = (
            f"best {self.key} {self.best:g}: validation accuracy {_percent(found.accuracy)} over"
            f" {seeds} seed{'' if seeds == 1 else 's'}"
        )
        if self.not_separated:
            near = " and ".join(f"{value:g}" for value in self.not_separated)
            text += f"; not separated from {near} by the seeds"
        if self.edge:
            text += f"; it is the {self.edge} value that was tried"
        return text

    def table(self) -> str:
        """What was tried, as text: a line for each value, the best one with a star."""
        name = self.key.rpartition(".")[2]
        lines = [f"  {name:>10}  validation  deviation  seeds  stage"]
        for tried in self.tried:
            mark = "*" if tried.value == self.best else " "
            score = "diverged" if tried.diverged else _percent(tried.accuracy)
            lines.append(
                f"{mark} {tried.value:>10g}  {score:>10}  {_percent(tried.deviation):>9}"
                f"  {len(tried.by_seed):>5}  {tried.stage}"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All values as JSON."""
        return {
            "key": self.key,
            "around": self.around,
            "best": self.best,
            "edge": self.edge,
            "not_separated": self.not_separated,
            "tried": [asdict(tried) for tried in self.tried],
        }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"
