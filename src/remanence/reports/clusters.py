"""Drift by cluster: accuracy of each cluster over rounds, and forgetting of previous clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import drift_of
from remanence.metrics.drift import cluster_curves, concept_forgetting
from remanence.metrics.groups import Group, mean_curve
from remanence.reports.line_plots import describe_steps, draw_line, mark_steps
from remanence.reports.theme import (
    Figure,
    FigureState,
    as_text,
    axis,
    class_colors,
    layout,
    line_style,
    percent_axis,
    round_axis,
    rounded,
)
from remanence.results.run import Run


def draw_clusters(groups: Sequence[Group]) -> Figure | None:
    """Accuracy of each cluster's clients on their own data: one line a cluster, for a method that
    the reader selects.
    """
    shown = [group for group in groups if any(drift_of(run) for run in group.runs)]
    count = max(
        (
            found[0].by_concept.shape[2]
            for group in shown
            for run in group.runs
            if (found := drift_of(run))
        ),
        default=0,
    )
    if count < 2:
        return None
    states = [_make_state(group, count) for group in shown]
    names = [f"cluster {cluster}" for cluster in range(count)]
    lines = [
        go.Scatter(
            name=name,
            mode="lines",
            line=line_style(index) | {"color": color},
            hovertemplate="%{y:.1%}",
            meta={"columns": ["cluster", "round", "accuracy"]},
            **states[0].data[index],
        )
        for index, (name, color) in enumerate(zip(names, class_colors(count), strict=True))
    ]
    rounds = [round for state in states for line in state.data for round in line["x"]]
    shape = layout(
        340,
        names,
        xaxis=round_axis(rounds),
        yaxis=percent_axis("accuracy"),
        hovermode="x unified",
        **mark_steps(groups),
    )
    return Figure(
        name="clusters",
        title="Accuracy of each cluster",
        plot=go.Figure(lines, shape),
        caption="Mean accuracy, on the data of a cluster, of the clients that are in the cluster at"
        " the time; a gap is a time without clients. Lines far apart show that the model is worse"
        f" for one cluster.{describe_steps(groups)}",
        alt=states[0].alt,
        states=states,
        frame="",
    )


def _make_state(group: Group, count: int) -> FigureState:
    found = [pair[0] for run in group.runs if (pair := drift_of(run)) is not None]
    rounds = np.unique(np.concatenate([curves.round for curves in found]))
    stack = np.full((len(found), len(rounds), count), np.nan)
    for index, curves in enumerate(found):
        values = cluster_curves(curves)
        stack[index, np.searchsorted(rounds, curves.round), : values.shape[1]] = values
    means = nan_mean(stack, axis=0)  # [R, M]
    ends = ", ".join(
        f"cluster {cluster} {value:.1%}"
        for cluster, value in enumerate(means[-1])
        if not np.isnan(value)
    )
    return FigureState(
        group.label,
        "",
        [{"x": rounds.tolist(), "y": rounded(means[:, cluster])} for cluster in range(count)],
        f"Line chart of the accuracy of each cluster's clients in {group.label}. At round"
        f" {rounds[-1]}: {ends}.",
    )


def draw_previous_concepts(groups: Sequence[Group]) -> Figure | None:
    """What clients forget of clusters that they have left, over rounds."""
    traces: list[Any] = []
    names, rounds, details = [], [], []
    for index, group in enumerate(groups):
        curves = mean_curve(group, _previous_concepts)
        if curves[0]:
            names.append(as_text(group.label))
            rounds += curves[0]
            traces += draw_line(names[-1], index, *curves, columns=("method", "round", "forgotten"))
            details.append(f"{group.label} {100 * curves[1][-1]:+.1f} points")
    if not traces:
        return None
    y_axis = axis("forgetting", tickformat=".3~p")
    return Figure(
        name="previous-concepts",
        title="Forgetting of previous clusters",
        plot=go.Figure(
            traces,
            layout(
                320,
                names,
                xaxis=round_axis(rounds),
                yaxis=y_axis,
                hovermode="x unified",
                **mark_steps(groups),
            ),
        ),
        caption="Accuracy on the data of a cluster at a client's last recorded round in it, minus"
        " the accuracy there now, averaged over clients and the clusters they have left; lower is"
        f" better. Below zero it has improved since.{describe_steps(groups)}",
        alt="Line chart of what clients forget of clusters they have left. At the end:"
        f" {'; '.join(details)}.",
    )


def _previous_concepts(run: Run) -> dict[int, float]:
    found = drift_of(run)
    if found is None:
        return {}
    lost = nan_mean(concept_forgetting(found[0]), axis=1)
    return {
        int(round): float(value)
        for round, value in zip(found[0].round, lost, strict=True)
        if not np.isnan(value)
    }
