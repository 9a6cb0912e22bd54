"""Lines over rounds: with a band over seeds, and with marks between the time steps of a drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from remanence.metrics.groups import Group, step_starts
from remanence.reports.theme import PALETTE, legend, line_style, rounded, with_alpha

BOUNDARY = "#8a8f98"  # a gray visible on a light and on a dark page
STEP_NAMES_HEIGHT = 18  # pixels between the plot and the legend
FEW_STEPS = 4  # with more, only the first mark is named `step 0`, the others are numbers


def draw_line(
    name: str,
    index: int,
    across: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float | None] = (),
    columns: Sequence[str] = ("method", "round", "accuracy"),
    **more: Any,
) -> list[Any]:
    """Traces of one line, and before it a band of one standard deviation where there are several
    seeds.

    Args:
        name: Shown in the legend.
        index: Of the line in the figure; it picks color and dash.
        across: Positions on the x axis.
        means: Values over seeds, one a position.
        deviations: Over seeds; None at positions with one seed.
        columns: Names of the data when saved as CSV.
        **more: Changes to the line, as plotly's `update` takes them.
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
    there = [x for x, _, _ in with_band]
    band = go.Scatter(
        x=there + there[::-1],
        y=rounded(edge),
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=with_alpha(PALETTE[index % len(PALETTE)], 0.16),
        hoverinfo="skip",
        showlegend=False,
        legendgroup=name,
    )
    return [band, line]


def mark_steps(groups: Sequence[Group]) -> dict[str, Any]:
    """Parts of a layout that mark the time steps: a dotted line with the step's number at each.

    Empty where the data do not drift.
    """
    starts = step_starts(groups)
    if len(starts) < 2:
        return {}
    line = {"color": BOUNDARY, "width": 1, "dash": "dot"}
    position = {"xref": "x", "yref": "paper"}
    boundaries = [
        {"type": "line", "x0": start - 0.5, "x1": start - 0.5, "y0": 0, "y1": 1}
        | {"layer": "below", "line": line}
        | position
        for start in starts[1:]
    ]
    label = {"xanchor": "left", "yanchor": "bottom", "xshift": 1, "showarrow": False}
    names = [
        {
            "text": f"step {step}" if step == 0 or len(starts) <= FEW_STEPS else str(step),
            "x": start - 0.5,
            "y": 1,
            "font": {"size": 11},
        }
        | label
        | position
        for step, start in enumerate(starts)
    ]
    return {
        "shapes": boundaries,
        "annotations": names,
        "meta": {"top": STEP_NAMES_HEIGHT},
        "legend": legend(STEP_NAMES_HEIGHT),
    }


def describe_steps(groups: Sequence[Group]) -> str:
    """A sentence of a caption about these marks; empty where there are none."""
    if len(step_starts(groups)) < 2:
        return ""
    return " Dotted lines mark the time steps, at which the data drift."
