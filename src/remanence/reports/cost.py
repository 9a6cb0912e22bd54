"""Accuracy against communication and against time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.convergence import CostCurve, accuracy_per_bytes, accuracy_per_seconds
from remanence.metrics.groups import Group, describe_model, deviation_of
from remanence.reports.line_plots import draw_line
from remanence.reports.table_columns import readable_bytes, readable_seconds
from remanence.reports.theme import Figure, as_text, axis, layout, percent_axis
from remanence.results.run import Run

BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
SECONDS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def draw_bytes(groups: Sequence[Group]) -> Figure | None:
    """Accuracy against the bytes that all clients and the server sent."""
    return _draw(
        groups,
        accuracy_per_bytes,
        BYTES,
        readable_bytes,
        "accuracy-by-bytes",
        "Accuracy against communication",
        "communication",
        "the bytes that all clients and the server have sent",
    )


def draw_time(groups: Sequence[Group]) -> Figure | None:
    """Accuracy against wall-clock time."""
    return _draw(
        groups,
        accuracy_per_seconds,
        SECONDS,
        readable_seconds,
        "accuracy-by-time",
        "Accuracy against time",
        "time",
        "the time that the rounds took",
    )


def _draw(
    groups: Sequence[Group],
    measure: Callable[[Run], CostCurve],
    units: Sequence[tuple[float, str]],
    readable: Callable[[float | None], str],
    name: str,
    title: str,
    axis_title: str,
    what: str,
) -> Figure | None:
    lines = [(group, *_mean_over_seeds([measure(run) for run in group.runs])) for group in groups]
    lines = [line for line in lines if len(line[1]) and line[1][-1] > 0]
    if not lines:
        return None
    most = max(float(cost[-1]) for _, cost, _, _ in lines)
    size, unit = next((size, unit) for size, unit in units if most >= size or size == 1.0)
    traces: list[Any] = []
    for index, (group, cost, accuracy, deviation) in enumerate(lines):
        across = [float(f"{value / size:.4g}") for value in cost]
        traces += draw_line(
            as_text(group.label),
            index,
            across,
            accuracy,
            deviation,
            columns=("method", unit, "accuracy"),
        )
    names = [as_text(group.label) for group, *_ in lines]
    ends = "; ".join(
        f"{group.label} {accuracy[-1]:.1%} for {readable(float(cost[-1]))}"
        for group, cost, accuracy, _ in lines
    )
    return Figure(
        name=name,
        title=title,
        plot=go.Figure(
            traces,
            layout(
                340,
                names,
                xaxis=axis(f"{axis_title}, {unit}", rangemode="tozero"),
                yaxis=percent_axis("accuracy"),
                hovermode="closest",
            ),
        ),
        caption=f"Accuracy of {describe_model(groups)} against {what} until then. Higher and"
        " further left is better. A method that costs more in each round has a longer line.",
        alt=f"Line chart of accuracy against {what}. At the end: {ends}.",
    )


def _mean_over_seeds(
    curves: Sequence[CostCurve],
) -> tuple[np.ndarray, list[float], list[float | None]]:
    """Means over the seeds that recorded a round.

    Returns:
        Cost [n], accuracy, and the standard deviation of the accuracy.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for curve in curves:
        for round, cost, accuracy in zip(
            curve.round.tolist(), curve.cost.tolist(), curve.accuracy.tolist(), strict=True
        ):
            points.setdefault(round, []).append((cost, accuracy))
    means = [np.mean(points[round], axis=0) for round in sorted(points)]
    spread = [deviation_of([accuracy for _, accuracy in points[round]]) for round in sorted(points)]
    return np.array([cost for cost, _ in means]), [float(accuracy) for _, accuracy in means], spread
