"""The panels of a figure on paper: where they are, and their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from remanence.reports.matplotlib_annotations import write_percent
from remanence.reports.matplotlib_marks import Axes, MplPanel
from remanence.reports.matplotlib_values import AxisScale, as_list, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW_PANELS = 3  # with fewer, maps are below each other in one column
ROOM = 48  # characters of the tick labels' size along a column
MAX_NAMES = 26  # names along an axis; of more, some are left out


def add_panels(
    figure: Figure,
    layout: dict[str, Any],
    traces: Sequence[dict[str, Any]],
    names: Sequence[tuple[str, str]],
    columns: Sequence[float],
) -> tuple[dict[tuple[str, str], MplPanel], float]:
    """Add a panel for every pair of axes, arranged as in the report.

    Returns:
        The panels by their axes, and their total height in inches.
    """
    scales = {axis: axis_scale(axis, traces, layout) for pair in names for axis in pair}
    rows = sorted({axis_domain(layout, y)[1] for _, y in names}, reverse=True)
    heights = [
        max(
            _panel_height(layout, pair, scales, traces)
            for pair in names
            if axis_domain(layout, pair[1])[1] == row
        )
        for row in rows
    ]
    widths = [
        next(axis_length(layout, x) for x, _ in names if axis_domain(layout, x)[0] == column)
        for column in columns
    ]
    grid = figure.add_gridspec(len(rows), len(columns), height_ratios=heights, width_ratios=widths)
    panels: dict[tuple[str, str], MplPanel] = {}
    for x, y in names:
        ax = figure.add_subplot(
            grid[rows.index(axis_domain(layout, y)[1]), columns.index(axis_domain(layout, x)[0])]
        )
        panels[x, y] = MplPanel(
            ax, scales[x], scales[y], side_by_side=_count_side_by_side(traces, x, y)
        )
    return panels, sum(heights) + 0.45 * len(rows)


def axis_key(axis: str) -> str:
    """The key of an axis in a layout.

    >>> axis_key("x"), axis_key("y2")
    ('xaxis', 'yaxis2')
    """
    return f"{axis[0]}axis{axis[1:]}"


def axis_domain(layout: dict[str, Any], axis: str) -> tuple[float, float]:
    """The part of the figure that an axis spans, from 0 to 1."""
    low, high = layout.get(axis_key(axis), {}).get("domain") or (0.0, 1.0)
    return round(float(low), 3), round(float(high), 3)


def use_two_columns(layout: dict[str, Any], names: Sequence[tuple[str, str]]) -> None:
    """Arrange three or more maps in two columns, as on a wide screen."""
    count = (layout.get("meta") or {}).get("panels", 1)
    if count < FEW_PANELS or len(names) != count:
        return
    rows = math.ceil(count / 2)
    for place, (x, y) in enumerate(names):
        row, column = divmod(place, 2)
        layout[axis_key(x)] = layout.get(axis_key(x), {}) | {
            "domain": [column * 0.5, column * 0.5 + 0.5]
        }
        layout[axis_key(y)] = layout.get(axis_key(y), {}) | {
            "domain": [1 - (row + 1) / rows, 1 - row / rows]
        }


def axis_length(layout: dict[str, Any], axis: str) -> float:
    low, high = axis_domain(layout, axis)
    return max(high - low, 0.02)


def axis_scale(axis: str, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> AxisScale:
    """A scale of names where the axis has names, in the given order or in that of the data."""
    settings, letter = layout.get(axis_key(axis), {}), axis[0]
    values = [
        value
        for trace in traces
        if (trace.get(f"{letter}axis") or letter) == axis
        for value in as_list(trace.get(letter))
    ]
    if settings.get("type") != "category" and not any(isinstance(value, str) for value in values):
        return AxisScale()
    ordered = dict.fromkeys(
        plain_text(value)
        for value in [*as_list(settings.get("categoryarray")), *values]
        if value is not None
    )
    return AxisScale({word: place for place, word in enumerate(ordered)})


def _panel_height(
    layout: dict[str, Any],
    pair: tuple[str, str],
    scales: dict[str, AxisScale],
    traces: Sequence[dict[str, Any]],
) -> float:
    """Height of a panel in inches: up to MAX_NAMES names on the y axis get a line each."""
    names = scales[pair[1]].names
    mine = [
        trace for trace in traces if (trace.get("xaxis") or "x", trace.get("yaxis") or "y") == pair
    ]
    maps = [trace for trace in mine if trace.get("type") == "heatmap"]
    if names is not None:
        dots = (
            sum(trace.get("type") in ("scatter", None) for trace in mine)
            if layout.get("scattermode") == "group"
            else 1
        )
        return max(0.7, min(len(names), MAX_NAMES) * max(0.14, 0.07 * dots))
    if maps:
        return max(0.7, min(2.4, 0.22 * max(len(as_list(trace["z"])) for trace in maps)))
    square = layout.get(axis_key(pair[1]), {}).get("scaleanchor") or layout.get(
        axis_key(pair[0]), {}
    ).get("scaleanchor")
    return 3.0 if square else 1.9 if axis_length(layout, pair[1]) > 0.6 else 1.4


def _count_side_by_side(
    traces: Sequence[dict[str, Any]], x: str, y: str
) -> dict[str, tuple[int, int]]:
    mine = [
        trace
        for trace in traces
        if (trace.get("xaxis") or "x", trace.get("yaxis") or "y") == (x, y)
    ]
    bars = sum(trace.get("type") == "bar" for trace in mine)
    dots = sum(
        trace.get("type", "scatter") == "scatter" and "markers" in trace.get("mode", "lines")
        for trace in mine
    )
    return {"bar": (0, max(bars, 1)), "scatter": (0, max(dots, 1))}


def set_axis(
    ax: Axes, letter: str, settings: dict[str, Any], scale: AxisScale, columns: int
) -> None:
    """Give an axis of a panel plotly's settings: title, limits, ticks, grid and visibility."""
    axis = ax.xaxis if letter == "x" else ax.yaxis
    title = settings.get("title") or {}
    text = title.get("text") or "" if isinstance(title, dict) else title
    axis.set_label_text(plain_text(text))
    _set_limits(ax, letter, settings, scale, columns)
    if str(settings.get("tickformat") or "").endswith(("p", "%")):
        axis.set_major_formatter(write_percent)
    has_map = any(artist.get_gid() is not None for artist in ax.collections)
    grid = settings.get("showgrid", True) is not False and not has_map and scale.names is None
    ax.grid(grid, axis="x" if letter == "x" else "y")
    if settings.get("visible") is False:
        axis.set_visible(False)
        for side in ("bottom", "top") if letter == "x" else ("left", "right"):
            ax.spines[side].set_visible(False)
    ax.spines["top"].set_visible(False)
    ax.spines["right"].set_visible(False)


def _set_limits(
    ax: Axes, letter: str, settings: dict[str, Any], scale: AxisScale, columns: int
) -> None:
    from matplotlib import ticker

    axis = ax.xaxis if letter == "x" else ax.yaxis
    low, high = ax.get_xlim() if letter == "x" else ax.get_ylim()
    if scale.names is not None:
        low, high = _set_names(axis, list(scale.names), letter, columns)
    else:
        data = ax.dataLim.intervalx if letter == "x" else ax.dataLim.intervaly
        if settings.get("rangemode") == "tozero" and data[0] >= 0:
            low = 0.0
        if _counts(ax, letter) and not settings.get("tickformat"):
            axis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))
    limits = settings.get("range")
    if limits and None not in limits:
        low, high = float(limits[0]), float(limits[1])
    if settings.get("autorange") == "reversed":
        low, high = max(low, high), min(low, high)
    (ax.set_xlim if letter == "x" else ax.set_ylim)(low, high)


def _set_names(axis: Any, names: list[str], letter: str, columns: int) -> tuple[float, float]:
    """Set names along an axis, fewer where they would overlap; return the limits of the axis."""
    sizes = [max(map(len, word.split("\n"))) for word in names] or [1]
    cell = ROOM / columns / len(sizes)  # characters that fit beside each other
    vertical = (
        letter == "x"
        and max(sizes) > 3
        and any((one + next) / 2 + 1 > cell for one, next in pairwise(sizes))
    )
    fitting = (
        MAX_NAMES if letter == "y" or vertical else max(2, int(ROOM / columns / (max(sizes) + 1)))
    )
    step = math.ceil(len(names) / fitting) if len(names) > fitting and not _has_gaps(names) else 1
    axis.set_ticks(range(0, len(names), step), labels=names[::step])
    axis.set_tick_params(length=0, **({"rotation": 90} if vertical else {}))
    return -0.5, len(names) - 0.5


def _has_gaps(names: Sequence[str]) -> bool:
    """Are there empty names that separate a few others?"""
    return len(names) <= MAX_NAMES and any(not word.strip() for word in names)


def _counts(ax: Axes, letter: str) -> bool:
    """Are the values whole numbers, such as rounds or clients?"""
    place = 0 if letter == "x" else 1
    values = [
        value for line in ax.lines for value in line.get_xydata()[:, place] if not math.isnan(value)
    ]
    label = (ax.xaxis if letter == "x" else ax.yaxis).get_label_text()
    return (bool(values) and all(float(value).is_integer() for value in values)) or label in (
        "round",
        "client",
        "time step",
    )
