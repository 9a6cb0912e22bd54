"""The style that all figures share: colors distinct for color-blind readers, thin axes, and
names that are shown as plain text. `Figure` is what every draw function returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Okabe and Ito's palette without black and yellow, which are invisible on a dark or a white page.
# Where colors repeat, dashes and symbols differ.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
# Paul Tol's "muted" scheme: ten colors for areas side by side.
CLASS_PALETTE = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#BBBBBB",
)
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
MAP = "Cividis"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
LONGEST_NAME = 48  # characters of a name in a figure
INK, RULE = "#2b2b2b", "#d9d9d9"  # on white; the page replaces them on a dark screen


@dataclass(frozen=True)
class FigureState:
    """One state of a figure, which the reader selects by method and frame."""

    method: str  # its label; equal for all states of a figure with one method
    frame: str  # such as the number of a round; empty where only the method is selected
    data: list[dict[str, Any]]  # what changes in each trace: its x, y, z, ...
    alt: str  # a description for readers who cannot see it
    axes: dict[str, Any] = field(default_factory=dict)  # what changes in the layout, by dotted path


@dataclass(frozen=True)
class Figure:
    """A figure with its title, caption and states."""

    name: str  # id in the page and file name
    title: str
    plot: Any  # plotly's Figure
    caption: str  # what it shows and how to read it
    alt: str  # a description for readers who cannot see it
    # in order, those of a method together; `chosen` is shown first
    states: Sequence[FigureState] = ()
    chosen: int = 0
    frame: str = "round"  # the meaning of a state's frame

    @property
    def saves_data(self) -> bool:
        """Does a trace name its data, so that they can be saved as CSV?"""
        return any(trace.meta and trace.meta.get("columns") for trace in self.plot.data)

    @property
    def methods(self) -> list[str]:
        """The methods of its states, in order."""
        return list(dict.fromkeys(state.method for state in self.states))

    @property
    def frames(self) -> int:
        """The largest number of states of a method."""
        return max(Counter(state.method for state in self.states).values(), default=0)


def default_state(states: Sequence[FigureState]) -> int:
    """The last state of the first method, which a figure shows first."""
    return max(index for index, state in enumerate(states) if state.method == states[0].method)


def shorten(name: object, longest: int = LONGEST_NAME) -> str:
    """A name on one line, cut where it is long."""
    text = " ".join(str(name).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def as_text(name: object) -> str:
    """A name escaped for plotly, which reads some HTML in every text.

    >>> as_text("<b>cat</b> & dog")
    '&lt;b&gt;cat&lt;/b&gt; &amp; dog'
    """
    return shorten(name).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def name_classes(names: Sequence[object], count: int) -> list[str]:
    """A different name for each class, since an axis merges equal names.

    >>> name_classes(["cat", "cat"], 3)
    ['cat (0)', 'cat (1)', 'class 2']
    """
    texts = [
        shorten(names[index] if index < len(names) else f"class {index}", 24)
        for index in range(count)
    ]
    often = Counter(texts)
    return [f"{text} ({index})" if often[text] > 1 else text for index, text in enumerate(texts)]


def line_style(index: int) -> dict[str, Any]:
    """Color, dash and width of line number `index`."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "dash": DASHES[index // len(PALETTE) % len(DASHES)],
        "width": 2,
    }


def marker_style(index: int) -> dict[str, Any]:
    """Color, symbol and size of markers number `index`."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "symbol": SYMBOLS[index % len(SYMBOLS)],
        "size": 8,
    }


def with_alpha(color: str, opacity: float) -> str:
    """A color `#rrggbb` with an opacity.

    >>> with_alpha("#0072B2", 0.2)
    'rgba(0, 114, 178, 0.2)'
    """
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"


def class_colors(count: int) -> list[str]:
    """A color for each class; for more than ten, steps of viridis in an order in which neighbors
    differ.
    """
    if count <= len(CLASS_PALETTE):
        return list(CLASS_PALETTE[:count])
    from plotly.colors import sample_colorscale

    half = (count + 1) // 2
    steps = [index // 2 + (half if index % 2 else 0) for index in range(count)]
    return [
        str(color) for color in sample_colorscale("Viridis", [step / (count - 1) for step in steps])
    ]


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with thin lines; `more` overrides."""
    settings = {
        "title": {"text": title, "standoff": 6, "font": {"size": 13}},
        "gridcolor": RULE,
        "linecolor": RULE,
        "zerolinecolor": RULE,
        "automargin": True,
        "fixedrange": False,
    }
    return settings | more


def round_axis(rounds: Sequence[int], **more: Any) -> dict[str, Any]:
    """An axis of rounds, with whole numbers."""
    few = {"dtick": 1} if max(rounds) - min(rounds) <= 10 else {}
    return axis("round", showgrid=False, **few | more)


def percent_axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis in percent."""
    return axis(title, tickformat=".3~p", rangemode="tozero", **more)


def legend(above: int = 5) -> dict[str, Any]:
    """A horizontal legend, `above` pixels above a plot of usual height."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1 + above / 250,
        "yanchor": "bottom",
        "traceorder": "normal",
    }


def layout(height: int, names: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """A layout with the legend on top and a transparent background.

    Args:
        height: In pixels.
        names: The entries of the legend.
        **more: Settings that override; entries of `meta` are added to those with which the page
            fits the figure to a screen.
    """
    meta = {
        "height": height,
        "legend": len(names),
        "longest": max((len(name) for name in names), default=0),
    }
    return {
        "template": {},  # the default template would add seven kilobytes to every figure
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "font": {
            "family": FONT,
            "size": 13,
            "color": INK,
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": len(names) > 1,
        "legend": legend(),
        "hoverlabel": {"align": "left", "namelength": -1},
        "meta": meta | more.pop("meta", {}),
    } | more


def class_axis(count: int, **more: Any) -> dict[str, Any]:
    """An axis of classes from top to bottom; up to 25 all have names."""
    every = {"dtick": 1} if count <= 25 else {}
    return axis(type="category", autorange="reversed", showgrid=False, ticks="", **every | more)


def rounded(values: Any, digits: int = 4) -> Any:
    """Nested lists with few digits and None for NaN: small in the page and exact enough for a
    figure.
    """
    if isinstance(values, np.ndarray | list | tuple):
        return [rounded(value, digits) for value in values]
    return None if values is None or np.isnan(values) else round(float(values), digits)
