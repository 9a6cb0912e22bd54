"""The drift schedule: the cluster of every client at every time step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.groups import Group, clusters_of
from remanence.report.heatmaps import COLOR_BAR
from remanence.report.theme import Figure, axis, class_colors, layout, shorten

MAX_NUMBERED = 60  # clients; with more, a cell is too narrow for the number of its cluster
MAX_EXPLAINED = 8  # clusters whose data the caption describes


def draw_drift(groups: Sequence[Group]) -> Figure | None:
    """The drift schedule of the first run whose data drift."""
    run = next(
        (run for group in groups for run in group.runs if run.metadata.get("clusters")), None
    )
    if run is None or (clusters := clusters_of(run)) is None:
        return None
    return draw_schedule(
        clusters.tolist(),
        concepts=run.metadata.get("concepts") or (),
        origin=f" Drawn with seed {run.config.seed}.",
    )


def draw_schedule(
    clusters: Sequence[Sequence[int]],
    title: str = "Cluster of each client over time",
    *,
    concepts: Sequence[object] = (),
    origin: str = "",
) -> Figure:
    """A heat map of clusters: rows are time steps, columns clients, colors clusters.

    Args:
        clusters: The cluster of each client at each time step [T][K].
        title: Of the figure.
        concepts: A description of each cluster's data.
        origin: A last sentence of the caption.
    """
    table = np.array(clusters, dtype=np.int64)
    count = int(table.max()) + 1
    moved = int((table[1:] != table[:-1]).any(axis=0).sum())
    sizes = ", ".join(
        f"cluster {cluster} has {int((table[-1] == cluster).sum())}" for cluster in range(count)
    )
    held = "; ".join(
        f"cluster {index}: {shorten(concept, 120)}"
        for index, concept in enumerate(concepts[:MAX_EXPLAINED])
    )
    return Figure(
        name="schedule",
        title=title,
        plot=_draw_cells(table, count),
        caption="Rows are time steps, columns clients; color and number give the cluster whose data"
        " the client holds. A column that changes color is a client whose data drift."
        + (f" Data of the clusters: {held}." if held else "")
        + origin,
        alt=f"The cluster of {table.shape[1]} clients over {len(table)} time steps; {moved} of"
        " them change cluster at least once. "
        f"In the last step, {sizes}.",
    )


def _draw_cells(table: np.ndarray, count: int) -> Any:
    numbered = table.shape[1] <= MAX_NUMBERED
    cells = go.Heatmap(
        name="cluster",
        x=list(range(table.shape[1])),
        y=list(range(len(table))),
        z=table.tolist(),
        xgap=1,
        ygap=2,
        coloraxis="coloraxis",
        text=[[str(cluster) for cluster in row] for row in table.tolist()] if numbered else None,
        texttemplate="%{text}" if numbered else None,
        hovertemplate="client %{x}, time step %{y}: cluster %{z}<extra></extra>",
        meta={"columns": ["", "client", "time step", "cluster"]},
    )
    panel = max(60, min(28 * len(table), 520))
    return go.Figure(
        [cells],
        layout(
            panel + 130,
            coloraxis=cluster_colors(count),
            xaxis=axis("client", showgrid=False, zeroline=False, automargin=False),
            yaxis=axis(
                "time step",
                showgrid=False,
                zeroline=False,
                autorange="reversed",
                dtick=max(1, len(table) // 10),
            ),
            meta={"panels": 1, "panel": panel, "gap": 0, "bars": False},
        ),
    )


def cluster_colors(count: int) -> dict[str, Any]:
    """The color scale for clusters: equal blocks of one color."""
    steps: list[list[Any]] = []
    for index, color in enumerate(class_colors(count)):
        steps += [[index / count, color], [(index + 1) / count, color]]
    bar = COLOR_BAR | {
        "len": min(90 * count, 300),
        "tickmode": "array",
        "tickvals": list(range(count)),
        "ticktext": [f"cluster {index}" for index in range(count)],
    }
    return {"colorscale": steps, "cmin": -0.5, "cmax": count - 0.5, "colorbar": bar}
