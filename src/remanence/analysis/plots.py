"""Curves over rounds, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from remanence.core.errors import InputError, unknown
from remanence.metrics.groups import Group, group_runs, mean_curve, metric_curve
from remanence.reports.figure_files import require_matplotlib
from remanence.reports.theme import DASHES, PALETTE, shorten
from remanence.results.columns import NUMBERS, SHARES
from remanence.results.run import Comparison, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
BAND = 0.2  # opacity


def plot_curves(results: Sequence[Run | Comparison], value: str, ax: Axes | None) -> Axes:
    """Draw a number over rounds: one line for each method; for one method, test and validation.

    Args:
        results: Runs and comparisons.
        value: A column of the metrics.
        ax: The axes, or None for new ones.
    """
    if value not in NUMBERS:
        raise unknown("column", value, NUMBERS)
    require_matplotlib()
    groups = group_runs(results)
    lines = [(group, "test", group.label) for group in groups]
    if len(groups) == 1:
        lines = [(groups[0], "test", "test"), (groups[0], "valid", "validation")]
    drawn = [(label, *_points(group, value, split)) for group, split, label in lines]
    drawn = [line for line in drawn if line[1]]
    if not drawn:
        raise InputError(f"no run has recorded {value}: nothing to draw")
    ax = _new_axes() if ax is None else ax
    for index, (label, rounds, means, deviations) in enumerate(drawn):
        _draw(ax, index, label, rounds, means, deviations)
    ax.set_xlabel("round")
    ax.set_ylabel(value.replace("_", " "))
    ax.set_title(shorten(groups[0].label) if len(groups) == 1 else "")
    _set_ticks(ax, value in SHARES)
    ax.legend(frameon=False)
    return ax


def _points(
    group: Group, value: str, split: str
) -> tuple[list[int], list[float], list[float | None]]:
    return mean_curve(group, partial(metric_curve, value=value, split=split))


def _draw(
    ax: Axes,
    index: int,
    label: str,
    rounds: list[int],
    means: list[float],
    deviations: list[float | None],
) -> None:
    color = PALETTE[index % len(PALETTE)]
    style = list(STYLES.values())[index % len(STYLES)]
    name = label.replace("$", r"\$")  # matplotlib reads dollars as mathematics
    ax.plot(rounds, means, style, color=color, label=name, linewidth=1.8)
    spread = [(r, m, d) for r, m, d in zip(rounds, means, deviations, strict=True) if d is not None]
    if spread:
        ax.fill_between(
            [r for r, _, _ in spread],
            [m - d for _, m, d in spread],
            [m + d for _, m, d in spread],
            color=color,
            alpha=BAND,
            linewidth=0,
        )


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")[1]


def _set_ticks(ax: Axes, percent: bool) -> None:
    """Whole rounds, and shares as percentages."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
