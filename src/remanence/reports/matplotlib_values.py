"""Values of plotly figures for matplotlib: lists, texts, colors, color scales and axis scales."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

# points on paper for a pixel of the page, whose text is 13 pixels high where paper has 8 points
POINTS = 0.6


@dataclass
class AxisScale:
    """The positions of values on an axis: numbers are positions, names are numbered."""

    names: dict[str, int] | None = None

    def positions(self, values: Any) -> np.ndarray:
        """The position of every value; NaN for None and for unknown names."""
        listed = as_list(values)
        if self.names is not None:
            return np.array(
                [
                    self.names.get(plain_text(value), np.nan) if value is not None else np.nan
                    for value in listed
                ],
                dtype=float,
            )
        return np.array([np.nan if value is None else value for value in listed], dtype=float)


def read_color(text: Any) -> Any:
    """A CSS color for matplotlib.

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
    """A color scale of plotly, by name or as a list of stops, for matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap
    from plotly.colors import get_colorscale

    stops = get_colorscale(scale or "Cividis") if scale is None or isinstance(scale, str) else scale
    made = LinearSegmentedColormap.from_list(
        "scale", [(float(place), read_color(color)) for place, color in stops], N=256
    )
    # cells without a value are transparent, as on the page
    return made.with_extremes(bad=(1, 1, 1, 0))


def plain_text(text: Any) -> str:
    """A text of plotly, which may contain some HTML, as plain text.

    >>> plain_text("<b>cat</b> &lt;3<br>dog")
    'cat <3\\ndog'
    """
    bare = re.sub(
        r"</?(?:b|i|em|strong|sub|sup|span)(?: [^<>]*)?>", "", re.sub(r"<br ?/?>", "\n", str(text))
    )
    return html.unescape(bare)


def as_list(values: Any) -> list[Any]:
    """Values as a list; plotly encodes numpy arrays as base64."""
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
