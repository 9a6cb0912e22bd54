"""Heat maps in panels: their arrangement, their color scales, and how many fit into a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.reports.theme import MAP, as_text, layout

# ends and middle of the color scale of changes; distinct for color-blind readers
LOST, GAINED, EVEN = "#D55E00", "#0072B2", "#f4f3ef"
# a thin bar at the upper left corner of a figure; its length is added in pixels
COLOR_BAR = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "yref": "container",
    "y": 1,
    "yanchor": "top",
    "xpad": 0,
    "ypad": 0,
    "lenmode": "pixels",
    "thickness": 10,
    "outlinewidth": 0,
}
MAX_CELLS = 150_000  # of all states of a figure together: about one megabyte in the page
MAX_FRAMES = 40  # states of a method


@dataclass(frozen=True)
class Panel:
    """One map of a figure."""

    title: str
    cells: Any  # plotly's Heatmap
    x_axis: dict[str, Any]  # settings of plotly's axes
    y_axis: dict[str, Any]


def arrange_panels(
    panels: Sequence[Panel], height: int, gap: int, colors: Sequence[dict[str, Any]]
) -> Any:
    """A figure of panels below each other; the page puts two in a row where they fit.

    Args:
        panels: The heat maps.
        height: Of each panel, in pixels.
        gap: Pixels that the names beside a panel need.
        colors: One color scale, whose bar is on top of the figure, or one a panel, with a bar
            above each panel.
    """
    axes: dict[str, Any] = {}
    titles, several_bars = [], len(colors) > 1
    for index, panel in enumerate(panels):
        number = "" if index == 0 else str(index + 1)
        top = 1 - index / len(panels) - (0.1 / len(panels) if several_bars else 0)
        axes[f"xaxis{number}"] = panel.x_axis | {"anchor": f"y{number}", "automargin": False}
        axes[f"yaxis{number}"] = panel.y_axis | {
            "anchor": f"x{number}",
            "domain": [top - 0.7 / len(panels), top],
        }
        panel.cells.update(
            xaxis=f"x{number}",
            yaxis=f"y{number}",
            coloraxis=f"coloraxis{number}" if several_bars else "coloraxis",
        )
        if several_bars:
            bar = colors[index]["colorbar"] | {
                "yref": "paper",
                "y": top + 0.08 / len(panels),
                "yanchor": "bottom",
            }
            axes[f"coloraxis{number}"] = colors[index] | {"colorbar": bar}
        if panel.title:
            titles.append(panel_title(panel.title, number))
    if not several_bars:
        axes["coloraxis"] = colors[0]
    return go.Figure(
        [panel.cells for panel in panels],
        layout(
            len(panels) * (height + 80) + 60,
            annotations=titles,
            meta={"panels": len(panels), "panel": height, "gap": gap, "bars": several_bars},
            **axes,
        ),
    )


def panel_title(title: str, number: str) -> dict[str, Any]:
    """The title of the panel with this axis number, which is empty for the first panel."""
    position = {
        "xref": f"x{number} domain",
        "yref": f"y{number} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
    }
    return {"text": f"<b>{as_text(title)}</b>", "showarrow": False, **position}


def share_colors(highest: float = 1.0) -> dict[str, Any]:
    """The color scale for shares from 0 to `highest`.

    It has no title, which plotly prints across the bar of a low figure.
    """
    return {"colorscale": MAP, "cmin": 0, "cmax": highest, "colorbar": _bar(".3~p")}


def value_colors(lowest: float, highest: float) -> dict[str, Any]:
    """The color scale for numbers."""
    return {
        "colorscale": MAP,
        "cmin": lowest,
        "cmax": max(highest, lowest + 1e-9),
        "colorbar": _bar(".3~g"),
    }


def change_colors(values: Any) -> dict[str, Any]:
    """The color scale for changes: orange is lost, blue is gained, and zero is pale."""
    known = np.abs(np.asarray(values, dtype=float))
    limit = max(float(np.nanmax(known)) if known.size and not np.isnan(known).all() else 0.0, 0.01)
    return {
        "colorscale": [[0, GAINED], [0.5, EVEN], [1, LOST]],
        "cmin": -limit,
        "cmax": limit,
        "colorbar": _bar("+.2~p"),
    }


def _bar(ticks: str) -> dict[str, Any]:
    return COLOR_BAR | {"len": 200, "tickformat": ticks, "nticks": 5}


def pick_frames(rounds: Sequence[int], cells: int, methods: int) -> list[int]:
    """The rounds that the reader can select: evenly spread, with the first and the last.

    Maps of `cells` cells for these rounds of all methods fit into a page.

    >>> pick_frames([1, 2, 3, 4, 5], cells=25_000, methods=2)
    [1, 3, 5]
    """
    most = max(2, min(MAX_FRAMES, MAX_CELLS // max(1, cells * methods)))
    if len(rounds) <= most:
        return list(rounds)
    return [
        rounds[index]
        for index in np.linspace(0, len(rounds) - 1, most).round().astype(int).tolist()
    ]
