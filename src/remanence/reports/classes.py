"""Accuracy per class: over rounds as a heat map, and after the last round as dots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.groups import (
    Group,
    class_curve,
    class_names_of,
    deviation_of,
    mean_class_curve,
    mean_of,
)
from remanence.reports.heatmaps import Panel, arrange_panels, share_colors
from remanence.reports.theme import (
    Figure,
    as_text,
    axis,
    class_axis,
    layout,
    marker_style,
    name_classes,
    percent_axis,
    round_axis,
    rounded,
)

MAX_DOT_ROWS = 25  # classes; with more, they are on the x axis, sorted by accuracy
MAX_COLUMNS = 250  # rounds in a map: more are finer than a screen shows


def draw_classes_over_rounds(groups: Sequence[Group]) -> Figure | None:
    """A heat map of the accuracy per class over rounds, one panel a method."""
    panels, tables, details, most, longest = [], [], [], 0, 0
    for group in groups:
        rounds, accuracies = _select_rounds(*mean_class_curve(group))
        if not len(rounds):
            continue
        classes = name_classes(class_names_of(group), accuracies.shape[1])
        most, longest = max(most, len(classes)), max(longest, *map(len, classes))
        tables.append(accuracies)
        cells = go.Heatmap(
            name=as_text(group.label),
            x=rounds.tolist(),
            y=[as_text(name) for name in classes],
            z=rounded(accuracies.T, 3),
            hovertemplate="%{y}, round %{x}: %{z:.1%}<extra>" + as_text(group.label) + "</extra>",
            meta={"columns": ["method", "round", "class", "accuracy"]},
        )
        panels.append(
            Panel(
                group.label if len(groups) > 1 else "",
                cells,
                round_axis(rounds.tolist()),
                class_axis(len(classes)),
            )
        )
        details.append(f"{group.label}: {_name_extremes(classes, accuracies[-1])}")
    if not panels:
        return None
    unknown = any(bool(np.isnan(accuracies).all(axis=0).any()) for accuracies in tables)
    empty = " An empty row is a class without test examples." if unknown else ""
    seeds = " Mean over seeds." if any(len(group.runs) > 1 for group in groups) else ""
    return Figure(
        name="classes-over-rounds",
        title="Accuracy per class over rounds",
        plot=arrange_panels(panels, max(120, min(20 * most, 420)), 7 * longest, [share_colors()]),
        caption="Accuracy of each class (rows) after each recorded round (columns); brighter is"
        " more accurate. A bright row that turns dark is a class that is forgotten."
        f"{empty}{seeds}",
        alt="Heat map of the accuracy of every class over rounds. At the last round,"
        f" {'; '.join(details)}.",
    )


def draw_classes_at_end(groups: Sequence[Group]) -> Figure | None:
    """Accuracy per class after the last recorded round: one row a class, one dot a method."""
    found = []
    for group in groups:
        ends = [
            accuracies[-1]
            for rounds, accuracies in (class_curve(run) for run in group.runs)
            if len(rounds)
        ]
        if ends:
            # [seeds, C]
            found.append((group, name_classes(class_names_of(group), len(ends[0])), np.array(ends)))
    if not found:
        return None
    upright = len(found[0][1]) > MAX_DOT_ROWS
    typical = {
        name: mean_of(_mean_accuracy(name, classes, ends) for _, classes, ends in found) or 0.0
        for _, classes, _ in found
        for name in classes
    }
    order = sorted(typical, key=lambda name: typical[name]) if upright else list(typical)
    traces = [
        _dots(group, index, classes, ends, order, upright)
        for index, (group, classes, ends) in enumerate(found)
    ]
    along = axis(
        type="category",
        categoryorder="array",
        categoryarray=[as_text(name) for name in order],
        autorange=None if upright else "reversed",
    )
    values = percent_axis("accuracy", range=[-0.02, 1.02])
    names = [as_text(group.label) for group, _, _ in found]
    shape = layout(
        420 if upright else max(200, 70 + len(order) * (18 + 9 * len(found))),
        names,
        xaxis=along if upright else values,
        yaxis=values if upright else along,
        scattermode="group",
        scattergap=0.35,
    )
    bars = (
        " Bars are one standard deviation over seeds."
        if not upright and any(len(ends) > 1 for _, _, ends in found)
        else ""
    )
    sorted_by = ", from the hardest class to the easiest" if upright else ""
    details = "; ".join(
        f"{group.label}: {_name_extremes(classes, nan_mean(ends, axis=0))}"
        for group, classes, ends in found
    )
    return Figure(
        name="classes-at-end",
        title="Accuracy per class after the last round",
        plot=go.Figure(traces, shape),
        caption=f"Accuracy of each class after the last recorded round, one dot a"
        f" method{sorted_by}. A dot far below the others is a class on which a method is"
        f" much worse.{bars}",
        alt=f"Dot plot of the accuracy of every class after the last recorded round. {details}.",
    )


def _select_rounds(rounds: np.ndarray, accuracies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_COLUMNS rounds, evenly spread, with the first and the last."""
    if len(rounds) <= MAX_COLUMNS:
        return rounds, accuracies
    kept = np.linspace(0, len(rounds) - 1, MAX_COLUMNS).round().astype(int)
    return rounds[kept], accuracies[kept]


def _dots(
    group: Group, index: int, classes: list[str], ends: np.ndarray, order: list[str], upright: bool
) -> Any:
    by_name = {name: ends[:, column] for column, name in enumerate(classes)}
    there = [name for name in order if name in by_name]
    values = rounded([_mean_accuracy(name, classes, ends) for name in there])
    names = [as_text(name) for name in there]
    spread = rounded([deviation_of(by_name[name][~np.isnan(by_name[name])]) for name in there])
    bars = {
        "type": "data",
        "array": [value or 0 for value in spread],
        "thickness": 1.2,
        "width": 0,
        "visible": not upright and len(ends) > 1,
    }
    return go.Scatter(
        name=as_text(group.label),
        x=names if upright else values,
        y=values if upright else names,
        error_x=None if upright else bars,
        customdata=spread if len(ends) > 1 else None,
        mode="markers",
        orientation="v" if upright else "h",
        marker=marker_style(index) | ({"size": 6} if upright else {}),
        hovertemplate=("%{x}: %{y:.1%}" if upright else "%{y}: %{x:.1%}")
        + "<extra>"
        + as_text(group.label)
        + "</extra>",
        meta={
            "columns": [
                "method",
                *(["class", "accuracy"] if upright else ["accuracy", "class"]),
                *(["deviation"] if len(ends) > 1 else []),
            ]
        },
    )


def _mean_accuracy(name: str, classes: list[str], ends: np.ndarray) -> float | None:
    """Mean accuracy of a class over seeds; None for a class without test examples."""
    if name not in classes:
        return None
    mean = float(nan_mean(ends[:, classes.index(name)], axis=0))
    return None if np.isnan(mean) else mean


def _name_extremes(classes: list[str], accuracies: np.ndarray) -> str:
    known = [
        (float(share), name)
        for share, name in zip(accuracies, classes, strict=True)
        if not np.isnan(share)
    ]
    if not known:
        return "no class was evaluated"
    (low, worst), (high, best) = min(known), max(known)
    return f"best class {best} {high:.0%}, worst class {worst} {low:.0%}"
