"""The marks of a figure on paper: plotly's lines, dots, bars and heat maps, drawn by matplotlib.

Only what the report's figures use is translated. Other kinds of traces, modes and fills raise
NotImplementedError, so that no mark of a new figure is lost silently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from remanence.reports.matplotlib_values import (
    POINTS,
    AxisScale,
    as_list,
    plain_text,
    read_color,
    read_scale,
)

Axes: TypeAlias = Any  # matplotlib's own types are narrower than what its functions take
Artist: TypeAlias = Any

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
}
STEPS = {"hv": "steps-post"}


@dataclass
class MplPanel:
    """One panel, and what its traces share."""

    ax: Axes
    x_scale: AxisScale
    y_scale: AxisScale
    # height of the bars so far, by position and sign
    stacks: dict[tuple[float, bool], float] = field(default_factory=dict)
    # of traces that are drawn side by side: kind -> number drawn, total number
    side_by_side: dict[str, tuple[int, int]] = field(default_factory=dict)


def draw_trace(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    """Draw one trace; return the artist for the legend, or None for a trace without entry."""
    kind = trace.get("type", "scatter")
    if kind == "scatter":
        return _draw_scatter(panel, trace, layout)
    if kind == "bar":
        return _draw_bars(panel, trace, layout)
    if kind == "heatmap":
        _draw_map(panel, trace, layout)
        return None
    raise NotImplementedError(f"figures for paper support scatter, bar and heatmap, not {kind}")


def _draw_scatter(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    ax, mode = panel.ax, trace.get("mode", "lines")
    if "text" in mode:
        raise NotImplementedError("figures for paper do not support texts as marks")
    x, y = panel.x_scale.positions(trace.get("x")), panel.y_scale.positions(trace.get("y"))
    line, marker = trace.get("line") or {}, trace.get("marker") or {}
    color = read_color(line.get("color") or marker.get("color") or "#2b2b2b")
    handle: Artist | None = None
    if layout.get("scattermode") == "group" and "markers" in mode:
        shift = _next_side_by_side(panel, "scatter", 1 - layout.get("scattergap", 0.0))[0]
        x, y = (x, y + shift) if trace.get("orientation") == "h" else (x + shift, y)
    if trace.get("fill"):
        if trace["fill"] != "toself":
            raise NotImplementedError(f"figures for paper do not support fill={trace['fill']}")
        style = {"facecolor": read_color(trace.get("fillcolor") or color), "edgecolor": "none"}
        handle = ax.fill(x, y, **style)[0] if len(x) else None
    if "lines" in mode and line.get("width", 2) > 0:
        style = {
            "color": color,
            "linestyle": DASHES.get(line.get("dash", "solid"), "-"),
            "linewidth": line.get("width", 2) * POINTS,
        }
        (handle,) = ax.plot(x, y, drawstyle=STEPS.get(line.get("shape", ""), "default"), **style)
    bars = trace.get("error_x") or {}
    if bars.get("visible", bool(bars)) and bars.get("array") is not None:
        reach = AxisScale().positions(bars["array"])
        ax.errorbar(x, y, xerr=reach, fmt="none", ecolor=color, elinewidth=0.8)
    if "markers" in mode:
        handle = ax.scatter(
            x,
            y,
            s=np.square(np.asarray(float(marker.get("size") or 6)) * POINTS),
            marker=MARKERS.get(str(marker.get("symbol") or "circle"), "o"),
            facecolors=read_color(marker.get("color") or color),
            edgecolors="none",
            linewidths=0.8,
            zorder=3,
        )
    return handle


def _draw_bars(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    horizontal = trace.get("orientation") == "h"
    where = (
        panel.y_scale.positions(trace["y"]) if horizontal else panel.x_scale.positions(trace["x"])
    )
    length = np.nan_to_num(
        panel.x_scale.positions(trace["x"]) if horizontal else panel.y_scale.positions(trace["y"])
    )
    mode, room = layout.get("barmode", "group"), (1 - layout.get("bargap", 0.2)) * _spacing(where)
    base = np.zeros(len(where))
    if mode in ("stack", "relative"):
        for place, (at, more) in enumerate(zip(where, length, strict=True)):
            key = (float(at), bool(more < 0))
            base[place] = panel.stacks.get(key, 0.0)
            panel.stacks[key] = base[place] + more
    elif mode == "group":
        shift, room = _next_side_by_side(panel, "bar", room)
        where = where + shift
    marker = trace.get("marker") or {}
    edge = marker.get("line") or {}
    style = {
        "color": read_color(marker.get("color") or "#2b2b2b"),
        "edgecolor": read_color(edge.get("color") or "white"),
        "linewidth": float(edge.get("width") or 0) * POINTS,
    }
    drawn = (
        panel.ax.barh(where, length, height=room, left=base, **style)
        if horizontal
        else panel.ax.bar(where, length, width=room, bottom=base, **style)
    )
    return drawn.patches[0] if drawn.patches else None


def _draw_map(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> None:
    z = np.array(
        [
            [np.nan if value is None else float(value) for value in as_list(row)]
            for row in as_list(trace["z"])
        ]
    )
    x = (
        panel.x_scale.positions(trace["x"])
        if trace.get("x") is not None
        else np.arange(z.shape[1], dtype=float)
    )
    y = (
        panel.y_scale.positions(trace["y"])
        if trace.get("y") is not None
        else np.arange(z.shape[0], dtype=float)
    )
    scale = layout.get(trace["coloraxis"], {}) if trace.get("coloraxis") else trace
    low, high = _limits(scale, z, "c" if trace.get("coloraxis") else "z")
    mesh = panel.ax.pcolormesh(
        _edges(x),
        _edges(y),
        np.ma.masked_invalid(z),
        cmap=read_scale(scale.get("colorscale")),
        vmin=low,
        vmax=high,
        rasterized=z.size > 5000,
    )
    # the color scale whose bar it shares
    mesh.set_gid(trace.get("coloraxis") or ("own" if trace.get("showscale", True) else "none"))
    if trace.get("texttemplate"):  # always the text of the cell
        _label_cells(panel.ax, x, y, z, trace, mesh)


def _label_cells(
    ax: Axes, x: np.ndarray, y: np.ndarray, z: np.ndarray, trace: dict[str, Any], mesh: Any
) -> None:
    """Texts inside the cells of a heat map: black on light cells, white on dark ones."""
    for row, up in enumerate(y):
        for column, along in enumerate(x):
            value = z[row, column]
            if np.isnan(value):
                continue
            words = plain_text(as_list(as_list(trace["text"])[row])[column])
            red, green, blue, _ = mesh.cmap(mesh.norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            ax.text(
                along,
                up,
                words,
                ha="center",
                va="center",
                fontsize=6,
                color="white" if dark else "black",
            )


def _limits(scale: dict[str, Any], z: np.ndarray, letter: str) -> tuple[float, float]:
    """The values at the ends of a color scale."""
    known = z[~np.isnan(z)]
    seen = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = scale.get(f"{letter}min"), scale.get(f"{letter}max")
    low, high = seen[0] if low is None else low, seen[1] if high is None else high
    return float(low), float(high)


def _edges(centers: np.ndarray) -> np.ndarray:
    """The edges of cells around their centers.

    >>> _edges(np.array([1.0, 2.0, 4.0]))
    array([0.5, 1.5, 3. , 5. ])
    """
    if len(centers) == 1:
        return np.array([centers[0] - 0.5, centers[0] + 0.5])
    between = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - between[0]], between, [2 * centers[-1] - between[-1]]])


def _spacing(where: np.ndarray) -> float:
    """The smallest distance between positions: the width available to one bar."""
    steps = np.diff(np.unique(where[~np.isnan(where)]))
    return float(steps.min()) if len(steps) else 1.0


def _next_side_by_side(panel: MplPanel, kind: str, room: float) -> tuple[float, float]:
    """The offset and the width of the next of the traces that are drawn side by side."""
    drawn, count = panel.side_by_side.get(kind, (0, 1))
    panel.side_by_side[kind] = (drawn + 1, count)
    return ((drawn + 0.5) / count - 0.5) * room, room / count
