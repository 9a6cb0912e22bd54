"""Lines over rounds: with a band over seeds, and with the boundaries between the time steps of
drifting data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from remanence.metrics.groups import Group, step_starts
from remanence.report.theme import PALETTE, legend, line_style, rounded, with_alpha

BOUNDARY = "#8a8f98"  # a grey that stands out from light and from dark paper
ROOM_FOR_NAMES = 18  # pixels between drawing and legend
FEW_STEPS = 4  # beyond, only the first is called a step in words and the others are numbers


def draw_line(
    name: str,
    index: int,
    across: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float | None] = (),
    columns: Sequence[str] = ("method", "round", "accuracy"),
    **more: Any,
) -> list[Any]:
    """A line, after the band of one deviation around it where there are deviations. `columns`
    name its data when saved.
    """
    spread = list(deviations) or [None] * len(means)
    with_band = [(x, m, d) for x, m, d in zip(across, means, spread, strict=True) if d is not None]
    line = go.Scatter(
        name=name,
        x=list(across),
        y=rounded(list(means)),
        customdata=rounded(spread) if with_band else None,
        mode="lines" if len(across) > 1 else "markers",
        line=line_style(index),
        legendgroup=name,
        hovertemplate="%{y:.1%}" + (" ± %{customdata:.1%}" if with_band else ""),
        meta={"columns": [*columns, *(["deviation"] if with_band else [])]},
    ).update(more)
    if not with_band:
        return [line]
    edge = [m + d for _, m, d in with_band] + [m - d for _, m, d in reversed(with_band)]
    when = [x for x, _, _ in with_band]
    band = go.Scatter(
        x=when + when[::-1], y=rounded(edge), fill="toself", fillcolor=with_alpha(PALETTE[index % len(PALETTE)], 0.16), line={"width": 0},
        mode="lines", hoverinfo="skip", showlegend=False, legendgroup=name,
    )  # fmt: skip
    return [band, line]


def mark_steps(groups: Sequence[Group]) -> dict[str, Any]:
    """The boundaries between time steps as parts of a layout: a dotted line with the step's
    name; nothing where the data stay as they are.
    """
    starts = step_starts(groups)
    if len(starts) < 2:
        return {}
    boundaries = [
        {
            "type": "line", "xref": "x", "yref": "paper", "x0": start - 0.5, "x1": start - 0.5, "y0": 0, "y1": 1, "layer": "below",
            "line": {"color": BOUNDARY, "width": 1, "dash": "dot"},
        }
        for start in starts[1:]
    ]  # fmt: skip
    names = [
        {
            "text": f"step {step}" if step == 0 or len(starts) <= FEW_STEPS else str(step), "x": start - 0.5, "xref": "x", "y": 1,
            "yref": "paper", "xanchor": "left", "yanchor": "bottom", "xshift": 1, "showarrow": False, "font": {"size": 11},
        }
        for step, start in enumerate(starts)
    ]  # fmt: skip
    return {
        "shapes": boundaries,
        "annotations": names,
        "meta": {"top": ROOM_FOR_NAMES},
        "legend": legend(ROOM_FOR_NAMES),
    }


def describe_steps(groups: Sequence[Group]) -> str:
    """A sentence about those boundaries; empty where there are none."""
    return (
        " Dotted lines part the time steps: there the data drift."
        if len(step_starts(groups)) > 1
        else ""
    )
