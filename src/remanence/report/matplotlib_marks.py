"""The marks of a figure on paper: plotly's lines, dots, bars and heat maps, drawn by matplotlib.

Only what the report's figures use is translated. Anything else raises NotImplementedError, so that
no part of a new kind of figure is lost silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from remanence.report.matplotlib_values import (
    POINTS,
    AxisScale,
    as_list,
    first_of,
    is_many,
    plain_text,
    read_color,
    read_scale,
)

Axes: TypeAlias = Any  # matplotlib's own types are narrower than what its functions take
Artist: TypeAlias = Any

DASHES = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
    "longdashdot": (0, (8, 3, 2, 3)),
}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "triangle-left": "<",
    "triangle-right": ">",
    "cross": "P",
    "x": "X",
    "star": "*",
    "hexagon": "h",
    "pentagon": "p",
    "line-ew": "_",
    "line-ns": "|",
    "cross-thin": "+",
    "x-thin": "x",
}
STEPS = {"hv": "steps-post", "vh": "steps-pre", "hvh": "steps-mid"}


@dataclass
class MplPanel:
    """One panel, and what its traces share."""

    ax: Axes
    x_scale: AxisScale
    y_scale: AxisScale
    # height of the bars so far, by position and sign
    stacks: dict[tuple[float, bool], float] = field(default_factory=dict)
    last_line: tuple[np.ndarray, np.ndarray] | None = None  # what `fill: tonexty` fills to
    # of traces that are drawn side by side: kind -> number drawn, total number
    side_by_side: dict[str, tuple[int, int]] = field(default_factory=dict)


def draw_trace(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    """Draw one trace; return the artist for the legend, or None for a trace without entry."""
    kind = trace.get("type", "scatter")
    if kind in ("scatter", "scattergl"):
        return _draw_scatter(panel, trace, layout)
    if kind == "bar":
        return _draw_bars(panel, trace, layout)
    if kind == "heatmap":
        _draw_map(panel, trace, layout)
        return None
    raise NotImplementedError(f"figures for paper support scatter, bar and heatmap, not {kind}")


def _draw_scatter(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    ax, mode = panel.ax, trace.get("mode", "lines")
    x, y = panel.x_scale.positions(trace.get("x")), panel.y_scale.positions(trace.get("y"))
    line, marker = trace.get("line") or {}, trace.get("marker") or {}
    color = read_color(line.get("color") or first_of(marker.get("color")) or "#2b2b2b")
    alpha = trace.get("opacity")
    handle: Artist | None = None
    if layout.get("scattermode") == "group" and "markers" in mode:
        shift = _next_side_by_side(panel, "scatter", 1 - layout.get("scattergap", 0.0))[0]
        x, y = (x, y + shift) if trace.get("orientation") == "h" else (x + shift, y)
    if trace.get("fill"):
        handle = _fill(panel, trace, x, y, read_color(trace.get("fillcolor") or color))
    if "lines" in mode and line.get("width", 2) > 0:
        style = {
            "color": color,
            "linestyle": DASHES.get(line.get("dash", "solid"), "-"),
            "linewidth": line.get("width", 2) * POINTS,
        }
        (handle,) = ax.plot(
            x, y, drawstyle=STEPS.get(line.get("shape", ""), "default"), alpha=alpha, **style
        )
    _draw_errors(panel, trace, x, y, color)
    if "markers" in mode:
        handle = _draw_markers(ax, marker, x, y, color, alpha)
    if "text" in mode:
        texts = (
            as_list(trace.get("text"))
            if is_many(trace.get("text"))
            else [trace.get("text")] * len(x)
        )
        for across, up, text in zip(x, y, texts, strict=True):
            ax.annotate(plain_text(text), (across, up), ha="center", va="center", fontsize=7)
    panel.last_line = (x, y)
    return handle


def _draw_markers(
    ax: Axes, marker: dict[str, Any], x: np.ndarray, y: np.ndarray, color: Any, alpha: Any
) -> Artist:
    symbol, colors = str(first_of(marker.get("symbol")) or "circle"), marker.get("color")
    hollow = symbol.endswith("-open")
    many = is_many(colors)
    faces = [read_color(one) for one in as_list(colors)] if many else read_color(colors or color)
    size = marker.get("size") or 6
    sizes = AxisScale().positions(size) if is_many(size) else float(size)
    return ax.scatter(
        x,
        y,
        s=np.square(np.asarray(sizes) * POINTS),
        marker=MARKERS.get(symbol.removesuffix("-open"), "o"),
        facecolors="none" if hollow else faces,
        edgecolors=faces if hollow else "none",
        linewidths=0.8,
        alpha=alpha,
        zorder=3,
    )


def _fill(
    panel: MplPanel, trace: dict[str, Any], x: np.ndarray, y: np.ndarray, color: Any
) -> Artist | None:
    kind, ax = trace["fill"], panel.ax
    if kind == "toself":
        return ax.fill(x, y, facecolor=color, edgecolor="none")[0] if len(x) else None
    if kind == "tozeroy":
        return ax.fill_between(x, y, 0, facecolor=color, edgecolor="none")
    if kind == "tonexty" and panel.last_line is not None:
        below_x, below = panel.last_line
        outline = np.concatenate([x, below_x[::-1]]), np.concatenate([y, below[::-1]])
        return ax.fill(*outline, facecolor=color, edgecolor="none")[0]
    raise NotImplementedError(f"figures for paper do not support fill={kind}")


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
    if trace.get("base") is not None:
        base = base + AxisScale().positions(
            trace["base"] if is_many(trace["base"]) else [trace["base"]] * len(where)
        )
    elif mode in ("stack", "relative"):
        for place, (at, more) in enumerate(zip(where, length, strict=True)):
            key = (float(at), bool(more < 0))
            base[place] = panel.stacks.get(key, 0.0)
            panel.stacks[key] = base[place] + more
    elif mode == "group":
        shift, room = _next_side_by_side(panel, "bar", room)
        where = where + shift
    marker = trace.get("marker") or {}
    colors = marker.get("color") or "#2b2b2b"
    edge = marker.get("line") or {}
    style = {
        "color": [read_color(one) for one in as_list(colors)]
        if is_many(colors)
        else read_color(colors),
        "edgecolor": read_color(first_of(edge.get("color")) or "white"),
        "linewidth": float(first_of(edge.get("width")) or 0) * POINTS,
        "alpha": trace.get("opacity"),
    }
    shape = (marker.get("pattern") or {}).get("shape")
    hatch = {"hatch": first_of(shape) * 3} if shape and first_of(shape) else {}
    if horizontal:
        drawn = panel.ax.barh(where, length, height=room, left=base, **style, **hatch)
    else:
        drawn = panel.ax.bar(where, length, width=room, bottom=base, **style, **hatch)
    ends = (base + length, where) if horizontal else (where, base + length)
    _draw_errors(panel, trace, ends[0], ends[1], "#2b2b2b")
    return drawn.patches[0] if drawn.patches else None


def _draw_errors(
    panel: MplPanel, trace: dict[str, Any], x: np.ndarray, y: np.ndarray, color: Any
) -> None:
    for name, bars in (("xerr", trace.get("error_x") or {}), ("yerr", trace.get("error_y") or {})):
        if bars.get("visible", bool(bars)) and bars.get("array") is not None:
            style = {
                "fmt": "none",
                "ecolor": color,
                "elinewidth": 0.8,
                "alpha": trace.get("opacity"),
            }
            panel.ax.errorbar(x, y, **{name: AxisScale().positions(bars["array"])}, **style)


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
    if trace.get("texttemplate"):
        _label_cells(panel.ax, x, y, z, trace, mesh)


def _label_cells(
    ax: Axes, x: np.ndarray, y: np.ndarray, z: np.ndarray, trace: dict[str, Any], mesh: Any
) -> None:
    """Texts inside the cells of a heat map: black on light cells, white on dark ones."""
    form = re.fullmatch(r"%\{z(?::(\.\d+[f%]))?\}", trace["texttemplate"])
    for row, up in enumerate(y):
        for column, along in enumerate(x):
            value = z[row, column]
            if np.isnan(value):
                continue
            words = (
                format(value, form[1] or "g")
                if form
                else plain_text(as_list(as_list(trace.get("text"))[row])[column])
            )
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
    """The values at the ends of a color scale, symmetric around its middle if it has one."""
    known = z[~np.isnan(z)]
    seen = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = scale.get(f"{letter}min"), scale.get(f"{letter}max")
    low, high = seen[0] if low is None else low, seen[1] if high is None else high
    middle = scale.get(f"{letter}mid")
    if middle is not None:
        far = max(high - middle, middle - low)
        low, high = middle - far, middle + far
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
