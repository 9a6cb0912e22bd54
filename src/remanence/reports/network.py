"""The clients as a network: which peers they select, within and between clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import peer_records
from remanence.metrics.groups import Group
from remanence.reports.heatmaps import pick_frames
from remanence.reports.peers import peer_shares, runs_with_peers, sort_clients
from remanence.reports.theme import (
    Figure,
    FigureState,
    axis,
    class_colors,
    default_state,
    layout,
    rounded,
)
from remanence.results.ledger import PEER_COUNTS
from remanence.results.run import Run

STRONGEST = 5  # lines a client: to the peers that it selects most
# from this share of the client's selections on, a line is this many pixels wide
WIDTHS = ((0.0, 0.6), (0.1, 1.4), (0.25, 2.8))
LINES = (
    ("within a cluster", "rgba(120, 125, 133, 0.65)", "solid"),
    ("between clusters", "rgba(213, 94, 0, 0.75)", "dot"),
)


def draw_network(groups: Sequence[Group]) -> Figure | None:
    """Clients on a circle, colored by cluster, with lines to the peers that they select most."""
    shown = runs_with_peers(groups)
    if not shown:
        return None
    clusters = max(1 + int(np.max(run.metadata.get("clusters") or 0)) for _, run in shown)
    most = max(len(next(iter(peer_records(run)[PEER_COUNTS].values()))) for _, run in shown)
    states = []
    for group, run in shown:
        counts = peer_records(run)[PEER_COUNTS]
        states += [
            _make_state(group, run, round, counts[round], clusters)
            for round in pick_frames(sorted(counts), 8 * STRONGEST * most, len(shown))
        ]
    chosen = default_state(states)
    hidden: dict[str, Any] = {"visible": False, "range": [-1.08, 1.08]}
    names = [*(name for name, _, _ in LINES), *(f"cluster {place}" for place in range(clusters))]
    shape = layout(
        480,
        names if clusters > 1 else [],
        xaxis=axis(**hidden, constrain="domain"),
        yaxis=axis(**hidden, scaleanchor="x", constrain="domain"),
    )
    kinds = " Gray lines stay within a cluster, dotted orange lines connect clusters."
    return Figure(
        name="network",
        title="Network of clients",
        plot=go.Figure(_make_traces(states[chosen], clusters, most), shape),
        caption="Each dot is a client, with lines to the peers that it selected most often since"
        f" the previous record (at most {STRONGEST}); thicker is more often."
        f"{kinds if clusters > 1 else ''} Shown: the first seed.",
        alt=states[chosen].alt,
        states=states,
        chosen=chosen,
    )


def _make_traces(state: FigureState, clusters: int, most: int) -> list[Any]:
    """Traces of lines by kind and width, then of dots by cluster; `most`: clients in the figure."""
    styles = [(name, color, dash, width) for name, color, dash in LINES for _, width in WIDTHS]
    lines = [
        go.Scatter(
            name=name,
            mode="lines",
            line={"color": color, "width": width, "dash": dash},
            hoverinfo="skip",
            legendgroup=name,
            showlegend=clusters > 1 and width == WIDTHS[1][1],
            **state.data[index],
        )
        for index, (name, color, dash, width) in enumerate(styles)
    ]
    edge = {"width": 1, "color": "#ffffff"}
    dots = [
        go.Scatter(
            name=f"cluster {cluster}",
            mode="markers",
            marker={"color": color, "size": 11 if most <= 60 else 7, "line": edge},
            hovertemplate="%{text}<extra></extra>",
            showlegend=clusters > 1,
            **state.data[len(styles) + cluster],
        )
        for cluster, color in enumerate(class_colors(clusters))
    ]
    return [*lines, *dots]


def _make_state(
    group: Group, run: Run, round: int, counts: np.ndarray, clusters: int
) -> FigureState:
    shares = peer_shares(counts)
    order, membership = sort_clients(run, round, len(shares))
    angle = np.empty(len(order))
    angle[order] = 2 * np.pi * np.arange(len(order)) / len(order)
    position = rounded(np.stack([np.sin(angle), np.cos(angle)]), 3)  # clusters stay together
    cluster_of = np.empty(len(order), dtype=np.int64)
    cluster_of[order] = membership
    dots = []
    for cluster in range(clusters):
        inside = np.flatnonzero(cluster_of == cluster).tolist()
        texts = [
            f"client {client}, cluster {cluster}, selected {_most_selected(shares[client])}"
            for client in inside
        ]
        x, y = ([axis[client] for client in inside] for axis in position)
        dots.append({"x": x, "y": y, "text": texts})
    between = shares[cluster_of[:, None] != cluster_of[None, :]].sum() / max(shares.sum(), 1e-12)
    detail = f"; {between:.0%} of the selections are between clusters" if clusters > 1 else ""
    return FigureState(
        group.label,
        str(round),
        [*_connect(shares, cluster_of, position), *dots],
        f"Network of the {len(order)} clients of {group.label} at round {round}{detail}.",
    )


def _most_selected(shares: np.ndarray) -> str:
    """The peer with the largest share of a client's selections, in words.

    >>> _most_selected(np.array([0.25, 0.75])), _most_selected(np.zeros(2))
    ('client 1 most', 'no peer')
    """
    return f"client {int(shares.argmax())} most" if shares.any() else "no peer"


def _connect(
    shares: np.ndarray, cluster_of: np.ndarray, position: list[list[float]]
) -> list[dict[str, list[Any]]]:
    """Lines to the strongest peers of every client, by kind and width; None ends a line."""
    lines: list[dict[str, list[Any]]] = [
        {"x": [], "y": []} for _ in range(len(LINES) * len(WIDTHS))
    ]
    for client in range(len(shares)):
        for peer in np.argsort(-shares[client], kind="stable")[:STRONGEST].tolist():
            if shares[client, peer] > 0 and peer != client:
                width = sum(float(shares[client, peer]) >= lowest for lowest, _ in WIDTHS) - 1
                between = int(cluster_of[client] != cluster_of[peer])
                line = lines[width + len(WIDTHS) * between]
                line["x"] += [position[0][client], position[0][peer], None]
                line["y"] += [position[1][client], position[1][peer], None]
    return lines
