"""The partition: which classes each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.groups import Group
from remanence.reports.heatmaps import Panel, arrange_panels, share_colors
from remanence.reports.theme import (
    Figure,
    as_text,
    axis,
    class_axis,
    class_colors,
    layout,
    name_classes,
    percent_axis,
    rounded,
)
from remanence.results.client_names import client_names
from remanence.results.run import Run

MAX_BARS = 40  # clients; with more, a heat map shows the partition
MAX_BAR_CLASSES = 20  # classes; with more, colors are too similar


def draw_partition(groups: Sequence[Group]) -> Figure | None:
    """The partition of the first run that recorded its label counts."""
    run = next(
        (run for group in groups for run in group.runs if run.metadata.get("label_counts")), None
    )
    if run is None:
        return None
    counts = run.metadata["label_counts"]
    total = int(run.metadata.get("clients", len(counts)))
    return draw_client_data(
        counts,
        run.metadata.get("class_names", []),
        total,
        _describe_origin(run),
        names=client_names(run.metadata),
    )


def _describe_origin(run: Run) -> str:
    drifting = ", before any drift (time step 0)" if run.metadata.get("clusters") else ""
    return f", drawn with seed {run.config.seed}{drifting}"


def draw_client_data(
    label_counts: Sequence[Sequence[int]],
    class_names: Sequence[object],
    total: int,
    origin: str = "",
    names: Sequence[str] = (),
) -> Figure:
    """Label counts [clients, C] as shares: stacked bars for few clients, a heat map for many.
    `names` are those of the clients, where they have any.
    """
    counts = np.array(label_counts, dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    classes = name_classes(class_names, counts.shape[1])
    named = len(names) >= len(counts)
    clients = [as_text(names[i]) if named else i for i in range(len(counts))]
    shown = (
        f"the first {len(counts)} of {total} clients"
        if total > len(counts)
        else f"all {total} clients"
    )
    if len(counts) <= MAX_BARS and len(classes) <= MAX_BAR_CLASSES:
        plot = _draw_bars(classes, clients, counts, shares)
        meaning = (
            "Each bar is a client, each color a class: bars of few colors are clients with few"
            " classes."
        )
    else:
        plot = _draw_map(classes, clients, shares)
        meaning = (
            "Each column is a client, each row a class; brighter is a larger share of the client's"
            " examples."
        )
    return Figure(
        name="partition",
        title="Classes of each client",
        plot=plot,
        caption=f"{meaning} Shown: {shown}{origin}.",
        alt=f"The share of each class among each client's training examples, for {shown}. "
        f"A client's most frequent class makes up {shares.max(axis=1).mean():.0%} of its"
        " examples on average.",
    )


def _draw_bars(
    classes: list[str], clients: Sequence[int | str], counts: np.ndarray, shares: np.ndarray
) -> Any:
    colors = class_colors(len(classes))
    bars = [
        go.Bar(
            name=as_text(name),
            x=clients,
            y=rounded(shares[:, index]),
            customdata=counts[:, index].astype(int).tolist(),
            marker={
                "color": colors[index],
                "line": {"width": 1, "color": "rgba(255, 255, 255, 0.7)"},
            },
            hovertemplate="client %{x}: %{y:.0%} (%{customdata} examples)<extra>"
            + as_text(name)
            + "</extra>",
            meta={"columns": ["class", "client", "share", "examples"]},
        )
        for index, name in enumerate(classes)
    ]
    across = axis("client", type="category", showgrid=False)
    return go.Figure(
        bars,
        layout(
            380,
            classes,
            barmode="stack",
            bargap=0.12,
            xaxis=across,
            yaxis=percent_axis("share of its examples", range=[0, 1]),
        ),
    )


def _draw_map(classes: list[str], clients: Sequence[int | str], shares: np.ndarray) -> Any:
    cells = go.Heatmap(
        name="share",
        x=clients,
        y=[as_text(name) for name in classes],
        z=rounded(shares.T, 3),
        hovertemplate="client %{x}, %{y}: %{z:.0%}<extra></extra>",
        meta={"columns": ["", "client", "class", "share"]},
    )
    panel = Panel("", cells, axis("client", showgrid=False), class_axis(len(classes)))
    return arrange_panels(
        [panel],
        max(200, min(20 * len(classes), 520)),
        0,
        [share_colors(float(shares.max()) or 1.0)],
    )
