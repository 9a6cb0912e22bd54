"""The clients as a network: who listens to whom, and does it cross between clusters?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.groups import Group
from remanence.report.heatmaps import pick_frames
from remanence.report.peers import peer_records, peer_shares, sort_clients
from remanence.report.theme import (
    Figure,
    FigureState,
    axis,
    class_colors,
    default_state,
    layout,
    rounded,
)
from remanence.results.ledger import HEARD
from remanence.results.run import Run

STRONGEST = 5  # peers of each listener whose lines are drawn
# from this share of the listener's times on, this many pixels
WIDTHS = ((0.0, 0.6), (0.1, 1.4), (0.25, 2.8))
LINES = (
    ("within a cluster", "rgba(120, 125, 133, 0.65)", "solid"),
    ("between clusters", "rgba(213, 94, 0, 0.75)", "dot"),
)


def draw_network(groups: Sequence[Group]) -> Figure | None:
    """Clients on a circle, colored by cluster, with lines to those they listen to most."""
    shown = [(group, run) for group in groups for run in group.runs[:1] if peer_records(run)[HEARD]]
    if not shown:
        return None
    clusters = max(1 + int(np.max(run.metadata.get("clusters") or 0)) for _, run in shown)
    most = max(len(next(iter(peer_records(run)[HEARD].values()))) for _, run in shown)
    states = []
    for group, run in shown:
        heard = peer_records(run)[HEARD]
        states += [
            _make_state(group, run, round, heard[round], clusters)
            for round in pick_frames(sorted(heard), 8 * STRONGEST * most, len(shown))
        ]
    picked = default_state(states)
    looks = [(name, color, dash, width) for name, color, dash in LINES for _, width in WIDTHS]
    traces: list[Any] = [
        go.Scatter(
            name=name,
            mode="lines",
            line={"color": color, "width": width, "dash": dash},
            hoverinfo="skip",
            legendgroup=name,
            showlegend=clusters > 1 and width == WIDTHS[1][1],
            **states[picked].data[place],
        )
        for place, (name, color, dash, width) in enumerate(looks)
    ]
    traces += [
        go.Scatter(
            name=f"cluster {cluster}",
            mode="markers",
            marker={
                "color": color,
                "size": 11 if most <= 60 else 7,
                "line": {"width": 1, "color": "#ffffff"},
            },
            hovertemplate="%{text}<extra></extra>",
            showlegend=clusters > 1,
            **states[picked].data[len(looks) + cluster],
        )
        for cluster, color in enumerate(class_colors(clusters))
    ]
    hidden: dict[str, Any] = {"visible": False, "range": [-1.08, 1.08]}
    names = (
        [*(name for name, _, _ in LINES), *(f"cluster {cluster}" for cluster in range(clusters))]
        if clusters > 1
        else []
    )
    shape = layout(
        480,
        names,
        xaxis=axis(**hidden, constrain="domain"),
        yaxis=axis(**hidden, scaleanchor="x", constrain="domain"),
    )
    sides = (
        " Grey lines stay within a cluster, dotted orange ones cross between clusters."
        if clusters > 1
        else ""
    )
    return Figure(
        name="network",
        title="The network of clients",
        plot=go.Figure(traces, shape),
        caption="Each dot is a client; lines join it to the peers it listened to most since the"
        f" record before (at most {STRONGEST}), thicker for more often."
        f"{sides} Shown: the first seed.",
        alt=states[picked].alt,
        states=states,
        chosen=picked,
    )


def _make_state(
    group: Group, run: Run, round: int, heard: np.ndarray, clusters: int
) -> FigureState:
    shares = peer_shares(heard)
    order, membership = sort_clients(run, round, len(shares))
    angle = np.empty(len(order))
    angle[order] = 2 * np.pi * np.arange(len(order)) / len(order)
    # clients of a cluster stand side by side
    place = rounded(np.stack([np.sin(angle), np.cos(angle)]), 3)
    cluster_of = np.empty(len(order), dtype=np.int64)
    cluster_of[order] = membership
    lines: list[dict[str, list[Any]]] = [
        {"x": [], "y": []} for _ in range(len(LINES) * len(WIDTHS))
    ]
    for listener in range(len(order)):
        for peer in np.argsort(-shares[listener], kind="stable")[:STRONGEST].tolist():
            if shares[listener, peer] > 0 and peer != listener:
                strength = sum(float(shares[listener, peer]) >= lowest for lowest, _ in WIDTHS) - 1
                line = lines[strength + len(WIDTHS) * int(cluster_of[listener] != cluster_of[peer])]
                line["x"] += [place[0][listener], place[0][peer], None]
                line["y"] += [place[1][listener], place[1][peer], None]
    dots = []
    for cluster in range(clusters):
        inside = np.flatnonzero(cluster_of == cluster).tolist()
        texts = [
            f"client {client}, cluster {cluster}, listened most to {int(shares[client].argmax())}"
            for client in inside
        ]
        dots.append(
            {
                "x": [place[0][client] for client in inside],
                "y": [place[1][client] for client in inside],
                "text": texts,
            }
        )
    crossing = shares[cluster_of[:, None] != cluster_of[None, :]].sum() / max(shares.sum(), 1e-12)
    told = f"; {crossing:.0%} of the listening crosses between clusters" if clusters > 1 else ""
    return FigureState(
        group.label,
        str(round),
        [*lines, *dots],
        f"Network of the {len(order)} clients of {group.label} at round {round}{told}.",
    )
