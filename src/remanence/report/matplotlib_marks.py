"""The marks of a figure on paper: plotly's lines, dots, bars and maps as matplotlib draws them.

Only what the report's figures use is translated. Anything else is refused by name, so that a new
kind of figure cannot silently lose a part of itself on its way to paper.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

Axes: TypeAlias = Any  # matplotlib's own types are narrower than what its functions take
Artist: TypeAlias = Any

# of paper for a pixel of the page, whose text is 13 pixels high where paper has 8 points
POINTS = 0.6
DASHES = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
    "longdashdot": (0, (8, 3, 2, 3)),
}
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "triangle-left": "<", "triangle-right": ">",
    "cross": "P", "x": "X", "star": "*", "hexagon": "h", "pentagon": "p", "line-ew": "_", "line-ns": "|", "cross-thin": "+", "x-thin": "x",
}  # fmt: skip
STEPS = {"hv": "steps-post", "vh": "steps-pre", "hvh": "steps-mid"}


@dataclass
class AxisScale:
    """One axis of a panel: numbers stay, words get a place each."""

    words: dict[str, int] | None = None

    def place(self, values: Any) -> np.ndarray:
        """Where values stand; NaN for what is not there."""
        listed = as_list(values)
        if self.words is not None:
            return np.array(
                [
                    self.words.get(plain(value), np.nan) if value is not None else np.nan
                    for value in listed
                ],
                dtype=float,
            )
        return np.array([np.nan if value is None else value for value in listed], dtype=float)


@dataclass
class MplPanel:
    """One drawing area and what its marks must know about each other."""

    ax: Axes
    across: AxisScale
    up: AxisScale
    # height of the bars so far, by place and sign
    stacks: dict[tuple[float, bool], float] = field(default_factory=dict)
    last_line: tuple[np.ndarray, np.ndarray] | None = None  # what `fill: tonexty` fills to
    side_by_side: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # of traces that stand side by side: kind -> number drawn, number in all


def draw_trace(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    """Draw one trace. -> what stands for it in the legend; None: nothing does"""
    kind = trace.get("type", "scatter")
    if kind in ("scatter", "scattergl"):
        return _draw_scatter(panel, trace, layout)
    if kind == "bar":
        return _draw_bars(panel, trace, layout)
    if kind == "heatmap":
        _draw_map(panel, trace, layout)
        return None
    raise NotImplementedError(f"figures for paper know scatter, bar and heatmap, not {kind}")


def _draw_scatter(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    ax, mode = panel.ax, trace.get("mode", "lines")
    x, y = panel.across.place(trace.get("x")), panel.up.place(trace.get("y"))
    line, marker = trace.get("line") or {}, trace.get("marker") or {}
    color = read_color(line.get("color") or _first(marker.get("color")) or "#2b2b2b")
    alpha = trace.get("opacity")
    sign: Artist | None = None
    if layout.get("scattermode") == "group" and "markers" in mode:
        shift = _next_beside(panel, "scatter", 1 - layout.get("scattergap", 0.0))[0]
        x, y = (x, y + shift) if trace.get("orientation") == "h" else (x + shift, y)
    if trace.get("fill"):
        sign = _fill(panel, trace, x, y, read_color(trace.get("fillcolor") or color))
    if "lines" in mode and line.get("width", 2) > 0:
        style = {
            "color": color,
            "linestyle": DASHES.get(line.get("dash", "solid"), "-"),
            "linewidth": line.get("width", 2) * POINTS,
        }
        (sign,) = ax.plot(
            x, y, drawstyle=STEPS.get(line.get("shape", ""), "default"), alpha=alpha, **style
        )
    _draw_errors(panel, trace, x, y, color)
    if "markers" in mode:
        symbol = str(_first(marker.get("symbol")) or "circle")
        colors = marker.get("color")
        painted = (
            [read_color(one) for one in as_list(colors)]
            if _is_many(colors)
            else read_color(colors or color)
        )
        size = (
            AxisScale().place(marker["size"])
            if _is_many(marker.get("size"))
            else float(marker.get("size") or 6)
        )
        hollow = symbol.endswith("-open")
        sign = ax.scatter(
            x, y, s=np.square(np.asarray(size) * POINTS), marker=MARKERS.get(symbol.removesuffix("-open"), "o"),
            facecolors="none" if hollow else painted, edgecolors=painted if hollow else "none", linewidths=0.8, alpha=alpha, zorder=3,
        )  # fmt: skip
    if "text" in mode:
        texts = (
            as_list(trace.get("text"))
            if _is_many(trace.get("text"))
            else [trace.get("text")] * len(x)
        )
        for across, up, text in zip(x, y, texts, strict=True):
            ax.annotate(plain(text), (across, up), ha="center", va="center", fontsize=7)
    panel.last_line = (x, y)
    return sign


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
    raise NotImplementedError(f"figures for paper cannot fill {kind}")


def _draw_bars(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> Artist | None:
    lying = trace.get("orientation") == "h"
    where = panel.up.place(trace["y"]) if lying else panel.across.place(trace["x"])
    length = np.nan_to_num(panel.across.place(trace["x"]) if lying else panel.up.place(trace["y"]))
    mode, room = layout.get("barmode", "group"), (1 - layout.get("bargap", 0.2)) * _spacing(where)
    base = np.zeros(len(where))
    if trace.get("base") is not None:
        base = base + AxisScale().place(
            trace["base"] if _is_many(trace["base"]) else [trace["base"]] * len(where)
        )
    elif mode in ("stack", "relative"):
        for place, (at, more) in enumerate(zip(where, length, strict=True)):
            key = (float(at), bool(more < 0))
            base[place] = panel.stacks.get(key, 0.0)
            panel.stacks[key] = base[place] + more
    elif mode == "group":
        shift, room = _next_beside(panel, "bar", room)
        where = where + shift
    marker = trace.get("marker") or {}
    colors = marker.get("color") or "#2b2b2b"
    edge = marker.get("line") or {}
    look = {
        "color": [read_color(one) for one in as_list(colors)]
        if _is_many(colors)
        else read_color(colors),
        "edgecolor": read_color(_first(edge.get("color")) or "white"),
        "linewidth": float(_first(edge.get("width")) or 0) * POINTS,
        "alpha": trace.get("opacity"),
    }
    shape = (marker.get("pattern") or {}).get("shape")
    hatch = {"hatch": _first(shape) * 3} if shape and _first(shape) else {}
    if lying:
        drawn = panel.ax.barh(where, length, height=room, left=base, **look, **hatch)
    else:
        drawn = panel.ax.bar(where, length, width=room, bottom=base, **look, **hatch)
    ends = (base + length, where) if lying else (where, base + length)
    _draw_errors(panel, trace, ends[0], ends[1], "#2b2b2b")
    return drawn.patches[0] if drawn.patches else None


def _draw_errors(
    panel: MplPanel, trace: dict[str, Any], x: np.ndarray, y: np.ndarray, color: Any
) -> None:
    for name, bars in (("xerr", trace.get("error_x") or {}), ("yerr", trace.get("error_y") or {})):
        if bars.get("visible", bool(bars)) and bars.get("array") is not None:
            look = {
                "fmt": "none",
                "ecolor": color,
                "elinewidth": 0.8,
                "alpha": trace.get("opacity"),
            }
            panel.ax.errorbar(x, y, **{name: AxisScale().place(bars["array"])}, **look)


def _draw_map(panel: MplPanel, trace: dict[str, Any], layout: dict[str, Any]) -> None:
    z = np.array(
        [
            [np.nan if value is None else float(value) for value in as_list(row)]
            for row in as_list(trace["z"])
        ]
    )
    x = (
        panel.across.place(trace["x"])
        if trace.get("x") is not None
        else np.arange(z.shape[1], dtype=float)
    )
    y = (
        panel.up.place(trace["y"])
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
    # whose color bar it shares
    mesh.set_gid(trace.get("coloraxis") or ("own" if trace.get("showscale", True) else "none"))
    if trace.get("texttemplate"):
        _label_cells(panel.ax, x, y, z, trace, mesh)


def _label_cells(
    ax: Axes, x: np.ndarray, y: np.ndarray, z: np.ndarray, trace: dict[str, Any], mesh: Any
) -> None:
    """The words or numbers inside a map, dark on light and light on dark."""
    form = re.fullmatch(r"%\{z(?::(\.\d+[f%]))?\}", trace["texttemplate"])
    for row, up in enumerate(y):
        for column, along in enumerate(x):
            value = z[row, column]
            if np.isnan(value):
                continue
            words = (
                format(value, form[1] or "g")
                if form
                else plain(as_list(as_list(trace.get("text"))[row])[column])
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
    """The values at the ends of a color scale; with a middle, both ends are equally far from
    it.
    """
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
    """The borders of cells around their centers.

    >>> _edges(np.array([1.0, 2.0, 4.0]))
    array([0.5, 1.5, 3. , 5. ])
    """
    if len(centers) == 1:
        return np.array([centers[0] - 0.5, centers[0] + 0.5])
    between = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - between[0]], between, [2 * centers[-1] - between[-1]]])


def _spacing(where: np.ndarray) -> float:
    """The smallest step between places: the room of one bar."""
    steps = np.diff(np.unique(where[~np.isnan(where)]))
    return float(steps.min()) if len(steps) else 1.0


def _next_beside(panel: MplPanel, kind: str, room: float) -> tuple[float, float]:
    """The next of the traces that stand side by side. -> how far it is moved, the room it has"""
    drawn, count = panel.side_by_side.get(kind, (0, 1))
    panel.side_by_side[kind] = (drawn + 1, count)
    return ((drawn + 0.5) / count - 0.5) * room, room / count


def read_color(text: Any) -> Any:
    """A color as CSS writes it, for matplotlib.

    >>> read_color("rgba(255, 0, 51, 0.5)")
    (1.0, 0.0, 0.2, 0.5)
    """
    found = re.fullmatch(
        r"rgba?\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*([\d.]+)\s*(?:,\s*([\d.]+)\s*)?\)", str(text)
    )
    if not found:
        return "none" if text in ("transparent", None) else text
    red, green, blue = (float(part) / 255 for part in found.groups()[:3])
    return red, green, blue, float(found[4] or 1)


def read_scale(scale: Any) -> Colormap:
    """A color scale of plotly, by name or as a list of stops."""
    from matplotlib.colors import LinearSegmentedColormap
    from plotly.colors import get_colorscale

    stops = get_colorscale(scale or "Cividis") if scale is None or isinstance(scale, str) else scale
    if stops and isinstance(stops[0], str):
        stops = [[place / max(len(stops) - 1, 1), color] for place, color in enumerate(stops)]
    made = LinearSegmentedColormap.from_list(
        "scale", [(float(place), read_color(color)) for place, color in stops], N=256
    )
    # as on the page: nothing is drawn where nothing is known
    return made.with_extremes(bad=(1, 1, 1, 0))


def plain(text: Any) -> str:
    """Plotly's little HTML as plain text.

    >>> plain("<b>cat</b> &lt;3<br>dog")
    'cat <3\\ndog'
    """
    bare = re.sub(
        r"</?(?:b|i|em|strong|sub|sup|span)(?: [^<>]*)?>", "", re.sub(r"<br ?/?>", "\n", str(text))
    )
    return html.unescape(bare)


def as_list(values: Any) -> list[Any]:
    """Values as a list; plotly packs numpy arrays as base64."""
    if values is None:
        return []
    if isinstance(values, dict) and "bdata" in values:
        array = np.frombuffer(base64.b64decode(values["bdata"]), dtype=np.dtype(values["dtype"]))
        shape = (
            [int(length) for length in str(values["shape"]).split(",")]
            if "shape" in values
            else [-1]
        )
        return list(array.reshape(shape).tolist())
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


def _is_many(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | dict) and not isinstance(value, str)


def _first(value: Any) -> Any:
    """The value, or the first of many."""
    return (as_list(value) or [None])[0] if _is_many(value) else value
