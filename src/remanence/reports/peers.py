"""Peer selection in decentralized runs: which peers each client selects, and how often peers of
its own cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import peer_records, peer_usage_of
from remanence.metrics.groups import Group, clusters_of, mean_curve, metric_curve
from remanence.reports.heatmaps import (
    Panel,
    arrange_panels,
    pick_frames,
    share_colors,
    value_colors,
)
from remanence.reports.line_plots import BOUNDARY, describe_steps, draw_line, mark_steps
from remanence.reports.theme import (
    Figure,
    FigureState,
    as_text,
    axis,
    class_axis,
    default_state,
    layout,
    line_style,
    percent_axis,
    round_axis,
    rounded,
)
from remanence.results.ledger import PEER_COUNTS, SIMILARITY
from remanence.results.run import Run

CHANCE = "random peers"
NO_SIMILARITY = "This method estimates no similarity"
NAMES = ("Share of selections", "Similarity estimated by the client")
TEMPLATES = ("%{z:.1%}", "%{z:.3~g}")


def sort_clients(run: Run, round: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Clients sorted by their cluster at a round.

    Returns:
        Client numbers in order [K], and their clusters in that order [K]; one cluster where the
        data do not drift.
    """
    clusters = clusters_of(run)
    if clusters is None:
        return np.arange(count), np.zeros(count, dtype=np.int64)
    length = int(run.metadata.get("rounds_per_step") or run.config.rounds)
    present = clusters[min(max(round - 1, 0) // length, len(clusters) - 1)]
    order = np.argsort(present, kind="stable")
    return order, present[order]


def peer_shares(counts: np.ndarray) -> np.ndarray:
    """How often a client (row) selected each peer (column), as shares [K, K]; a row of zeros for
    a client that selected no peer.

    >>> peer_shares(np.array([[0, 3, 1], [2, 0, 0], [0, 0, 0]]))
    array([[0.  , 0.75, 0.25],
           [1.  , 0.  , 0.  ],
           [0.  , 0.  , 0.  ]])
    """
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12))


def runs_with_peers(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """The first seed of every method that recorded its peer selections."""
    return [
        (group, run) for group in groups for run in group.runs[:1] if peer_records(run)[PEER_COUNTS]
    ]


def draw_peer_usage(groups: Sequence[Group]) -> Figure | None:
    """Which peers each client selects, and how similar it estimates them, over rounds."""
    shown = runs_with_peers(groups)
    if not shown:
        return None
    # methods with both matrices come first, so that the figure starts with both panels
    shown.sort(key=lambda pair: not peer_records(pair[1])[SIMILARITY])
    with_similarity = bool(peer_records(shown[0][1])[SIMILARITY])
    most = max(len(next(iter(peer_records(run)[PEER_COUNTS].values()))) for _, run in shown)
    states = _list_states(shown, most, with_similarity)
    chosen = default_state(states)
    plot = _plot_matrices(states[chosen], most, _color_scales(states, with_similarity))
    for state in states:
        titles = [note.to_plotly_json() for note in plot.layout.annotations]
        if with_similarity and state.data[1]["z"][0][0] is None:
            titles[1] |= {"text": f"<b>{NO_SIMILARITY}</b>"}
        state.axes["annotations"] = titles
    plot.layout.annotations = states[chosen].axes["annotations"]
    drifting = any(run.metadata.get("clusters") for _, run in shown)
    sorted_by = ", sorted by cluster, with lines between the clusters" if drifting else ""
    similar = ", and on the second map more similar" if with_similarity else ""
    return Figure(
        name="peer-selection",
        title="Which peers each client selects",
        plot=plot,
        caption=f"Rows are clients, columns peers{sorted_by}; brighter is selected more often since"
        f" the previous record{similar}. Bright blocks on the diagonal are clients that select"
        " peers of their own cluster. Shown: the first seed.",
        alt=states[chosen].alt,
        states=states,
        chosen=chosen,
    )


def _list_states(
    shown: Sequence[tuple[Group, Run]], most: int, with_similarity: bool
) -> list[FigureState]:
    states = []
    for group, run in shown:
        records = peer_records(run)
        cells = (1 + with_similarity) * most**2
        for round in pick_frames(sorted(records[PEER_COUNTS]), cells, len(shown)):
            shares, similarity = (
                peer_shares(records[PEER_COUNTS][round]),
                records[SIMILARITY].get(round),
            )
            states.append(_make_state(group, run, round, shares, similarity, with_similarity))
    return states


def _color_scales(states: Sequence[FigureState], with_similarity: bool) -> list[dict[str, Any]]:
    """One color scale a matrix, for all states together."""
    tables = [[np.array(part["z"], dtype=float) for part in state.data] for state in states]
    highest = max(float(np.nanmax(matrices[0])) for matrices in tables)
    if not with_similarity:
        return [share_colors(highest or 1.0)]
    known = [matrices[1] for matrices in tables if not np.isnan(matrices[1]).all()]
    ends = [np.nanpercentile(matrix, [1, 99]) for matrix in known] or [np.array([0.0, 1.0])]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    return [share_colors(highest or 1.0), value_colors(float(low), float(high))]


def _plot_matrices(state: FigureState, most: int, colors: Sequence[dict[str, Any]]) -> Any:
    panels = [
        Panel(
            NAMES[index] if len(colors) > 1 else "",
            go.Heatmap(
                name=as_text(NAMES[index]),
                hovertemplate="client %{y} and peer %{x}: " + TEMPLATES[index] + "<extra></extra>",
                meta={"columns": ["matrix", "peer", "client", "value"]},
                **part,
            ),
            axis("peer", type="category", showgrid=False, tickangle=0),
            class_axis(most, title="client"),
        )
        for index, part in enumerate(state.data)
    ]
    plot = arrange_panels(panels, 320, 60, colors)
    plot.layout.shapes = state.axes["shapes"]
    return plot


def _make_state(
    group: Group,
    run: Run,
    round: int,
    shares: np.ndarray,
    similarity: np.ndarray | None,
    with_similarity: bool,
) -> FigureState:
    order, clusters = sort_clients(run, round, len(shares))
    names = [str(client) for client in order.tolist()]
    empty = [[None] * len(names)] * len(names)
    matrices = [rounded(shares[np.ix_(order, order)], 3)]
    if with_similarity:
        matrices.append(
            empty if similarity is None else rounded(similarity[np.ix_(order, order)], 3)
        )
    drawn = 1 if similarity is None else len(matrices)
    edges = (np.flatnonzero(np.diff(clusters)) + 0.5).tolist()
    same = clusters[:, None] == clusters[None, :]
    own = float((shares[np.ix_(order, order)] * same).sum() / max(shares.sum(), 1e-12))
    detail = f"{own:.0%} of the selections are within clusters"
    detail = detail if len(edges) else f"{len(names)} clients"
    return FigureState(
        group.label,
        str(round),
        [{"x": names, "y": names, "z": matrix} for matrix in matrices],
        f"Heat map of the peers that clients of {group.label} select at round {round}: {detail}.",
        {
            "shapes": [
                line
                for index in range(drawn)
                for edge in edges
                for line in _cross(edge, index, len(names))
            ]
        },
    )


def _cross(edge: float, index: int, count: int) -> list[dict[str, Any]]:
    """Lines between two clusters, across and down the matrix of panel `index`."""
    number = "" if index == 0 else str(index + 1)
    line = {
        "type": "line",
        "xref": f"x{number}",
        "yref": f"y{number}",
        "line": {"color": "#ffffff", "width": 1.5},
    }
    return [
        line | {"x0": edge, "x1": edge, "y0": -0.5, "y1": count - 0.5},
        line | {"y0": edge, "y1": edge, "x0": -0.5, "x1": count - 0.5},
    ]


def draw_same_cluster(groups: Sequence[Group]) -> Figure | None:
    """The share of peer selections within clusters over rounds, beside that of random peers."""
    traces: list[Any] = []
    names, rounds, details = [], [], []
    chance: dict[int, float] = {}
    for index, group in enumerate(groups):
        curves = mean_curve(group, _same_cluster_curve)
        if curves[0]:
            names.append(as_text(group.label))
            rounds += curves[0]
            traces += draw_line(
                names[-1], index, *curves, columns=("method", "round", "own cluster")
            )
            details.append(f"{group.label} {sum(curves[1]) / len(curves[1]):.0%}")
        for run in group.runs[:1]:
            if not chance and (usage := peer_usage_of(run)) is not None:
                chance = _by_round(usage.round, usage.chance)
    if not traces:
        return None
    if chance:
        names.append(CHANCE)
        style = line_style(0) | {"color": BOUNDARY, "dash": "dash", "shape": "hv"}
        columns = ("method", "round", "own cluster")
        traces += draw_line(
            CHANCE, 0, list(chance), list(chance.values()), columns=columns, line=style
        )
        details.append(f"{CHANCE} {sum(chance.values()) / len(chance):.0%}")
    shape = layout(
        320,
        names,
        xaxis=round_axis(rounds),
        yaxis=percent_axis("within cluster"),
        hovermode="x unified",
        **mark_steps(groups),
    )
    return Figure(
        name="same-cluster",
        title="Peer selections within clusters",
        plot=go.Figure(traces, shape),
        caption="Share of peer selections that go to peers of the client's own cluster"
        f"{'; the dashed line is the share with randomly drawn peers' if chance else ''}."
        f"{describe_steps(groups)}",
        alt="Line chart of the share of peer selections within clusters. Mean over rounds:"
        f" {'; '.join(details)}.",
    )


def _same_cluster_curve(run: Run) -> dict[int, float]:
    """As recorded, or, for a run that did not record it, from its peer selections."""
    recorded = metric_curve(run, "same_cluster_share")
    usage = None if recorded else peer_usage_of(run)
    return recorded if usage is None else _by_round(usage.round, usage.same_cluster)


def _by_round(rounds: np.ndarray, values: np.ndarray) -> dict[int, float]:
    return {
        int(round): float(value)
        for round, value in zip(rounds, values, strict=True)
        if not np.isnan(value)
    }
