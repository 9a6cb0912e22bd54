"""A figure of the report for paper: the same plotly figure, drawn by matplotlib in the width of a
column.

What a figure shows is defined once, in its draw function; these modules only translate:
to_matplotlib.py (the whole figure), matplotlib_panels.py (panels and axes), matplotlib_marks.py
(lines, dots, bars, heat maps), matplotlib_annotations.py (texts, color bars) and
matplotlib_values.py (values). Texts are plain: matplotlib's math mode is off, so a dollar sign in
a name is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remanence.reports.matplotlib_annotations import (
    SIZE,
    add_color_bars,
    draw_shapes,
    write_annotations,
)
from remanence.reports.matplotlib_marks import MplPanel, draw_trace
from remanence.reports.matplotlib_panels import (
    add_panels,
    axis_domain,
    axis_key,
    set_axis,
    use_two_columns,
)
from remanence.reports.matplotlib_values import plain_text
from remanence.reports.theme import INK, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0  # inches: one column of a two-column paper, and both columns
FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
)
STYLE: dict[str, Any] = {
    "font.size": SIZE,
    "axes.labelsize": SIZE,
    "axes.titlesize": SIZE,
    "axes.titleweight": "bold",
    "legend.fontsize": SIZE - 0.5,
    "xtick.labelsize": SIZE - 1,
    "ytick.labelsize": SIZE - 1,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9a9a9a",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "remanence",
    "axes.unicode_minus": False,
}


def to_matplotlib(plot: Any) -> Figure:
    """A plotly figure as a matplotlib figure; of a figure with states, the one shown first."""
    from matplotlib.figure import Figure

    content = plot.to_plotly_json()
    layout = content["layout"]
    traces = [trace for trace in content["data"] if trace.get("visible", True) is True]
    names = list(dict.fromkeys(_axes_of(trace) for trace in traces))
    use_two_columns(layout, names)
    columns = sorted({axis_domain(layout, x)[0] for x, _ in names})
    width = COLUMN if len(columns) == 1 else PAGE
    legend = legend_names(traces, layout)
    entries = max(1, int(width / (0.42 + 0.062 * max(map(len, legend.values()), default=1))))
    figure = Figure(layout="constrained")
    panels, height = add_panels(figure, layout, traces, names, columns)
    figure.set_size_inches(width, height + 0.16 * math.ceil(len(legend) / entries))
    handles = _draw_traces(panels, traces, layout, list(legend.values()))
    for (x, y), panel in panels.items():
        set_axis(panel.ax, "x", layout.get(axis_key(x), {}), panel.x_scale, columns=len(columns))
        set_axis(panel.ax, "y", layout.get(axis_key(y), {}), panel.y_scale, columns=len(columns))
        if any(layout.get(axis_key(name), {}).get("scaleanchor") for name in (x, y)):
            panel.ax.set_aspect("equal", adjustable="box")
    draw_shapes(panels, layout)
    write_annotations(panels, layout)
    add_color_bars(figure, panels, layout)
    if len(handles) > 1 or (handles and layout.get("showlegend")):
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside upper left",
            ncols=min(entries, len(handles)),
            frameon=False,
            handlelength=1.6,
            columnspacing=1.0,
            borderpad=0.1,
            labelspacing=0.25,
        )
    return figure


def _axes_of(trace: dict[str, Any]) -> tuple[str, str]:
    return trace.get("xaxis") or "x", trace.get("yaxis") or "y"


def _draw_traces(
    panels: dict[tuple[str, str], MplPanel],
    traces: Sequence[dict[str, Any]],
    layout: dict[str, Any],
    legend: Sequence[str],
) -> dict[str, Any]:
    """Draw every trace; return the artists of the legend by name."""
    handles: dict[str, Any] = {}
    for trace in traces:
        handle = draw_trace(panels[_axes_of(trace)], trace, layout)
        label = plain_text(trace.get("name") or "")
        if handle is not None and label in legend and trace.get("showlegend", True):
            handles.setdefault(label, handle)
    return handles


def choose_fonts() -> list[str]:
    """The installed ones of FONTS: the default font, then fonts for other scripts."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return [name for name in FONTS if name in installed]


def legend_names(traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> dict[str, str]:
    """The names in the legend, as plain text."""
    if layout.get("showlegend") is False:
        return {}
    named = [
        trace
        for trace in traces
        if trace.get("name") and trace.get("showlegend", True) and trace.get("type") != "heatmap"
    ]
    return {trace["name"]: plain_text(trace["name"]) for trace in named}
