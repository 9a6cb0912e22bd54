"""A figure of the report for paper: the same figure, redrawn by matplotlib in the width of a
column.

Nothing is defined twice: what a figure shows is decided where the report draws it, and this file
only changes the pen. Names stay text: matplotlib's mathematics is off, so a dollar sign in a name
is a dollar sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from remanence.report.matplotlib_annotations import (
    SIZE,
    add_color_bars,
    draw_shapes,
    write_annotations,
    write_percent,
)
from remanence.report.matplotlib_marks import Axes, AxisScale, MplPanel, as_list, draw_trace, plain
from remanence.report.theme import INK, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0  # inches: one column of a two-column paper, and both
FEW_PANELS = 3  # fewer maps stand above one another in one column
ROOM = 48  # characters of a name's size along a column
MAX_WORDS = 26  # names along an axis; beyond, some are left out
FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
)
STYLE: dict[str, Any] = {
    "font.size": SIZE, "axes.labelsize": SIZE, "axes.titlesize": SIZE, "axes.titleweight": "bold", "legend.fontsize": SIZE - 0.5,
    "xtick.labelsize": SIZE - 1, "ytick.labelsize": SIZE - 1, "text.parse_math": False, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": "#9a9a9a", "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.6, "grid.color": RULE, "grid.linewidth": 0.5,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5, "axes.axisbelow": True,
    "hatch.linewidth": 0.4, "pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "remanence", "axes.unicode_minus": False,
}  # fmt: skip


def to_matplotlib(figure: Any) -> Figure:
    """A plotly figure as a matplotlib figure: what is visible before anybody touches a control."""
    from matplotlib.figure import Figure

    drawing = figure.to_plotly_json()
    layout, traces = (
        drawing["layout"],
        [trace for trace in drawing["data"] if trace.get("visible", True) is True],
    )
    names = list(
        dict.fromkeys((trace.get("xaxis") or "x", trace.get("yaxis") or "y") for trace in traces)
    )
    _spread_panels(layout, names)
    columns = sorted({_domain(layout, x)[0] for x, _ in names})
    width = COLUMN if len(columns) == 1 else PAGE
    legend = _legend_names(traces, layout)
    across = max(1, int(width / (0.42 + 0.062 * max(map(len, legend.values()), default=1))))
    paper = Figure(layout="constrained")
    panels, height = _place_panels(paper, layout, traces, names, columns)
    paper.set_size_inches(width, height + 0.16 * math.ceil(len(legend) / across))
    handles: dict[str, Any] = {}
    for trace in traces:
        sign = draw_trace(
            panels[trace.get("xaxis") or "x", trace.get("yaxis") or "y"], trace, layout
        )
        label = plain(trace.get("name") or "")
        if sign is not None and label in legend.values() and trace.get("showlegend", True):
            handles.setdefault(label, sign)
    for (x, y), panel in panels.items():
        _set_axis(panel.ax, "x", layout.get(_key(x), {}), panel.across, columns=len(columns))
        _set_axis(panel.ax, "y", layout.get(_key(y), {}), panel.up, columns=len(columns))
        if layout.get(_key(x), {}).get("scaleanchor") or layout.get(_key(y), {}).get("scaleanchor"):
            panel.ax.set_aspect("equal", adjustable="box")
    draw_shapes(panels, layout)
    write_annotations(panels, layout)
    add_color_bars(paper, panels, layout)
    if len(handles) > 1 or (handles and layout.get("showlegend")):
        paper.legend(
            list(handles.values()), list(handles), loc="outside upper left", ncols=min(across, len(handles)), frameon=False,
            handlelength=1.6, columnspacing=1.0, borderpad=0.1, labelspacing=0.25,
        )  # fmt: skip
    return paper


def _place_panels(
    paper: Figure,
    layout: dict[str, Any],
    traces: Sequence[dict[str, Any]],
    names: Sequence[tuple[str, str]],
    columns: Sequence[float],
) -> tuple[dict[tuple[str, str], MplPanel], float]:
    """A drawing area for every pair of axes, where the report has it. -> panels, inches they
    are high together
    """
    scales = {axis: _make_scale(axis, traces, layout) for pair in names for axis in pair}
    rows = sorted({_domain(layout, y)[1] for _, y in names}, reverse=True)
    heights = [
        max(
            _height(layout, pair, scales, traces)
            for pair in names
            if _domain(layout, pair[1])[1] == row
        )
        for row in rows
    ]
    widths = [
        next(_length(layout, x) for x, _ in names if _domain(layout, x)[0] == column)
        for column in columns
    ]
    grid = paper.add_gridspec(len(rows), len(columns), height_ratios=heights, width_ratios=widths)
    panels: dict[tuple[str, str], MplPanel] = {}
    for x, y in names:
        below = layout.get(_key(y), {}).get("overlaying")
        if below and (x, below) in panels:
            ax = panels[x, below].ax.twinx()
        else:
            ax = paper.add_subplot(
                grid[rows.index(_domain(layout, y)[1]), columns.index(_domain(layout, x)[0])]
            )
        panels[x, y] = MplPanel(ax, scales[x], scales[y], side_by_side=_count_beside(traces, x, y))
    return panels, sum(heights) + 0.45 * len(rows)


def choose_fonts() -> list[str]:
    """The house's font, then those that can write other scripts, as far as they are installed."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return [name for name in FONTS if name in installed]


def _key(axis: str) -> str:
    """
    >>> _key("x"), _key("y2")
    ('xaxis', 'yaxis2')
    """
    return f"{axis[0]}axis{axis[1:]}"


def _domain(layout: dict[str, Any], axis: str) -> tuple[float, float]:
    settings = layout.get(_key(axis), {})
    over = settings.get("overlaying")
    if over and over != "free":
        return _domain(layout, over)
    low, high = settings.get("domain") or (0.0, 1.0)
    return round(float(low), 3), round(float(high), 3)


def _spread_panels(layout: dict[str, Any], names: Sequence[tuple[str, str]]) -> None:
    """Many maps above one another are as long as a page: from three on they stand in two
    columns, as on a wide screen.
    """
    count = (layout.get("meta") or {}).get("panels", 1)
    if count < FEW_PANELS or len(names) != count:
        return
    rows = math.ceil(count / 2)
    for place, (x, y) in enumerate(names):
        row, column = divmod(place, 2)
        layout[_key(x)] = layout.get(_key(x), {}) | {"domain": [column * 0.5, column * 0.5 + 0.5]}
        layout[_key(y)] = layout.get(_key(y), {}) | {
            "domain": [1 - (row + 1) / rows, 1 - row / rows]
        }


def _length(layout: dict[str, Any], axis: str) -> float:
    low, high = _domain(layout, axis)
    return max(high - low, 0.02)


def _make_scale(axis: str, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> AxisScale:
    """Words where the axis has words, in the order asked for or in which they first come."""
    settings, letter = layout.get(_key(axis), {}), axis[0]
    values = [
        value
        for trace in traces
        if (trace.get(f"{letter}axis") or letter) == axis
        for value in as_list(trace.get(letter))
    ]
    if settings.get("type") != "category" and not any(isinstance(value, str) for value in values):
        return AxisScale()
    ordered = dict.fromkeys(
        plain(value)
        for value in [*as_list(settings.get("categoryarray")), *values]
        if value is not None
    )
    return AxisScale({word: place for place, word in enumerate(ordered)})


def _height(
    layout: dict[str, Any],
    pair: tuple[str, str],
    scales: dict[str, AxisScale],
    traces: Sequence[dict[str, Any]],
) -> float:
    """Inches a panel needs: every name on its upright axis gets a line, as long as there are
    few.
    """
    words = scales[pair[1]].words
    mine = [
        trace for trace in traces if (trace.get("xaxis") or "x", trace.get("yaxis") or "y") == pair
    ]
    maps = [trace for trace in mine if trace.get("type") == "heatmap"]
    if words is not None:
        dots = (
            sum(trace.get("type") in ("scatter", None) for trace in mine)
            if layout.get("scattermode") == "group"
            else 1
        )
        return max(0.7, min(len(words), MAX_WORDS) * max(0.14, 0.07 * dots))
    if maps:
        return max(0.7, min(2.4, 0.22 * max(len(as_list(trace["z"])) for trace in maps)))
    square = layout.get(_key(pair[1]), {}).get("scaleanchor") or layout.get(_key(pair[0]), {}).get(
        "scaleanchor"
    )
    return 3.0 if square else 1.9 if _length(layout, pair[1]) > 0.6 else 1.4


def _count_beside(traces: Sequence[dict[str, Any]], x: str, y: str) -> dict[str, tuple[int, int]]:
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


def _legend_names(traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> dict[str, str]:
    if layout.get("showlegend") is False:
        return {}
    named = [
        trace
        for trace in traces
        if trace.get("name") and trace.get("showlegend", True) and trace.get("type") != "heatmap"
    ]
    return {trace["name"]: plain(trace["name"]) for trace in named}


def _set_axis(
    ax: Axes, letter: str, settings: dict[str, Any], scale: AxisScale, columns: int
) -> None:
    from matplotlib import ticker

    axis = ax.xaxis if letter == "x" else ax.yaxis
    title = settings.get("title") or {}
    axis.set_label_text(plain(title.get("text") or "") if isinstance(title, dict) else plain(title))
    low, high = ax.get_xlim() if letter == "x" else ax.get_ylim()
    if settings.get("type") == "log":
        axis.set_units(None)
        (ax.set_xscale if letter == "x" else ax.set_yscale)("log")
    elif scale.words is not None:
        low, high = _set_words(axis, list(scale.words), letter, columns)
    else:
        data = ax.dataLim.intervalx if letter == "x" else ax.dataLim.intervaly
        if settings.get("rangemode") == "tozero" and data[0] >= 0:
            low = 0.0
        if _is_whole(ax, letter) and not settings.get("tickformat"):
            axis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))
    asked = settings.get("range")
    if asked and settings.get("type") != "log" and None not in asked:
        low, high = float(asked[0]), float(asked[1])
    if settings.get("autorange") == "reversed":
        low, high = max(low, high), min(low, high)
    if settings.get("type") != "log":
        (ax.set_xlim if letter == "x" else ax.set_ylim)(low, high)
    if settings.get("tickvals") is not None:
        texts = [plain(text) for text in as_list(settings.get("ticktext"))] or None
        axis.set_ticks(scale.place(settings["tickvals"]), labels=texts)
    form = str(settings.get("tickformat") or "")
    if form.endswith(("p", "%")):
        axis.set_major_formatter(write_percent)
    elif form.endswith("s"):
        axis.set_major_formatter(ticker.EngFormatter())
    has_map = any(artist.get_gid() is not None for artist in ax.collections)
    ax.grid(
        settings.get("showgrid", True) is not False and not has_map and scale.words is None,
        axis="x" if letter == "x" else "y",
    )
    if settings.get("visible") is False:
        axis.set_visible(False)
        for side in ("bottom", "top") if letter == "x" else ("left", "right"):
            ax.spines[side].set_visible(False)
    if settings.get("showticklabels") is False:
        axis.set_tick_params(labelbottom=False, labelleft=False, length=0)
    ax.spines["top"].set_visible(False)
    ax.spines["right"].set_visible(False)


def _set_words(axis: Any, words: list[str], letter: str, columns: int) -> tuple[float, float]:
    """Names along an axis, thinned where they would touch. -> the axis' ends"""
    sizes = [max(map(len, word.split("\n"))) for word in words] or [1]
    cell = ROOM / columns / len(sizes)  # characters beside each other
    upright = (
        letter == "x"
        and max(sizes) > 3
        and any((one + next) / 2 + 1 > cell for one, next in pairwise(sizes))
    )
    fitting = (
        MAX_WORDS if letter == "y" or upright else max(2, int(ROOM / columns / (max(sizes) + 1)))
    )
    step = math.ceil(len(words) / fitting) if len(words) > fitting and not _is_sparse(words) else 1
    axis.set_ticks(range(0, len(words), step), labels=words[::step])
    axis.set_tick_params(length=0, **({"rotation": 90} if upright else {}))
    return -0.5, len(words) - 0.5


def _is_sparse(words: Sequence[str]) -> bool:
    """Are some places left empty on purpose, between a few names?"""
    return len(words) <= MAX_WORDS and any(not word.strip() for word in words)


def _is_whole(ax: Axes, letter: str) -> bool:
    """Are these rounds, clients or other things that are counted?"""
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
