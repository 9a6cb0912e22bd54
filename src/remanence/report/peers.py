"""Who listened to whom where there is no server: matrices over time, the network, and how often
clients found their own cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import peer_usage_of
from remanence.metrics.groups import Group, cached_per_run, clusters_of, mean_curve, metric_curve
from remanence.report.heatmaps import Panel, arrange_panels, pick_frames, share_colors, value_colors
from remanence.report.line_plots import BOUNDARY, describe_steps, draw_line, mark_steps
from remanence.report.theme import (
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
from remanence.results.ledger import HEARD, SIMILARITY
from remanence.results.run import Run

CHANCE = "by chance"
NO_SIMILARITY = "This method keeps no similarity"


@cached_per_run
def peer_records(run: Run) -> dict[int, dict[int, np.ndarray]]:
    """Matrices [K, K] by kind and round; nothing where a run has a server."""
    found: dict[int, dict[int, np.ndarray]] = {HEARD: {}, SIMILARITY: {}}
    for record in run.peers if run.peers is not None else ():
        found[int(record["kind"])][int(record["round"])] = record["values"]
    return found


def sort_clients(run: Run, round: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Clients by cluster at a round. -> their numbers in order [K], their clusters in that
    order [K]; one cluster where nothing drifts
    """
    clusters = clusters_of(run)
    if clusters is None:
        return np.arange(count), np.zeros(count, dtype=np.int64)
    length = int(run.metadata.get("rounds_per_step") or run.config.rounds)
    present = clusters[min(max(round - 1, 0) // length, len(clusters) - 1)]
    order = np.argsort(present, kind="stable")
    return order, present[order]


def peer_shares(heard: np.ndarray) -> np.ndarray:
    """How often each client was listened to, as shares of the listener's times [K, K]; zeros for
    who listened to nobody.

    >>> peer_shares(np.array([[0, 3, 1], [2, 0, 0], [0, 0, 0]]))
    array([[0.  , 0.75, 0.25],
           [1.  , 0.  , 0.  ],
           [0.  , 0.  , 0.  ]])
    """
    return np.asarray(heard / np.maximum(heard.sum(axis=1, keepdims=True), 1e-12))


def draw_peer_usage(groups: Sequence[Group]) -> Figure | None:
    """Who listened to whom, and whom a client believes to be like itself: two matrices over
    time.
    """
    shown = [(group, run) for group in groups for run in group.runs[:1] if peer_records(run)[HEARD]]
    if not shown:
        return None
    # the first that is seen has both maps, if any has
    shown.sort(key=lambda pair: not peer_records(pair[1])[SIMILARITY])
    alike = bool(peer_records(shown[0][1])[SIMILARITY])
    most = max(len(next(iter(peer_records(run)[HEARD].values()))) for _, run in shown)
    states, highest, values = [], 0.0, []
    for group, run in shown:
        records = peer_records(run)
        for round in pick_frames(sorted(records[HEARD]), (1 + alike) * most**2, len(shown)):
            shares = peer_shares(records[HEARD][round])
            similarity = records[SIMILARITY].get(round)
            highest = max(highest, float(shares.max()))
            if similarity is not None:
                values.append(np.nanpercentile(similarity, [1, 99]))
            states.append(_make_state(group, run, round, shares, similarity, alike))
    picked = default_state(states)
    names = ["Listened to", "Similarity, as the listener believes"]
    panels = [
        Panel(
            names[index] if alike else "",
            go.Heatmap(
                name=as_text(names[index]),
                hovertemplate="client %{y} and peer %{x}: "
                + ("%{z:.1%}", "%{z:.3~g}")[index]
                + "<extra></extra>",
                meta={"columns": ["matrix", "peer", "client", "value"]},
                **part,
            ),
            axis("peer", type="category", showgrid=False, tickangle=0),
            class_axis(most, title="client"),
        )
        for index, part in enumerate(states[picked].data)
    ]
    low, high = (min(v[0] for v in values), max(v[1] for v in values)) if values else (0.0, 1.0)
    plot = arrange_panels(
        panels,
        320,
        60,
        [share_colors(highest or 1.0), value_colors(float(low), float(high))][: 1 + alike],
    )
    plot.layout.shapes = states[picked].axes["shapes"]
    for state in states:
        titles = [note.to_plotly_json() for note in plot.layout.annotations]
        if alike and state.data[1]["z"][0][0] is None:
            titles[1] |= {"text": f"<b>{NO_SIMILARITY}</b>"}
        state.axes["annotations"] = titles
    plot.layout.annotations = states[picked].axes["annotations"]
    sorted_by = (
        ", sorted by cluster, with lines between the clusters"
        if any(run.metadata.get("clusters") for _, run in shown)
        else ""
    )
    return Figure(
        name="listening",
        title="Who listened to whom",
        plot=plot,
        caption=f"Each row is a client, each column a peer{sorted_by}; brighter is more often"
        " since the record before"
        + (", and on the other map more alike" if alike else "")
        + ". Bright blocks on the diagonal are clients that found their own kind. Shown: the"
        " first seed.",
        alt=states[picked].alt,
        states=states,
        chosen=picked,
    )


def _make_state(
    group: Group,
    run: Run,
    round: int,
    shares: np.ndarray,
    similarity: np.ndarray | None,
    alike: bool,
) -> FigureState:
    order, clusters = sort_clients(run, round, len(shares))
    names = [str(client) for client in order.tolist()]
    empty = [[None] * len(names)] * len(names)
    matrices = [rounded(shares[np.ix_(order, order)], 3)]
    if alike:
        matrices.append(
            empty if similarity is None else rounded(similarity[np.ix_(order, order)], 3)
        )
    drawn = 1 if similarity is None else len(matrices)
    edges = (np.flatnonzero(np.diff(clusters)) + 0.5).tolist()
    same = clusters[:, None] == clusters[None, :]
    own = float((shares[np.ix_(order, order)] * same).sum() / max(shares.sum(), 1e-12))
    about = (
        f"{own:.0%} of the listening was within clusters" if len(edges) else f"{len(names)} clients"
    )
    return FigureState(
        group.label,
        str(round),
        [{"x": names, "y": names, "z": matrix} for matrix in matrices],
        f"Heat map of who listened to whom in {group.label} at round {round}: {about}.",
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
    """Lines between two clusters, across and down a matrix."""
    number = "" if index == 0 else str(index + 1)
    look = {
        "type": "line",
        "xref": f"x{number}",
        "yref": f"y{number}",
        "line": {"color": "#ffffff", "width": 1.5},
    }
    return [
        look | {"x0": edge, "x1": edge, "y0": -0.5, "y1": count - 0.5},
        look | {"y0": edge, "y1": edge, "x0": -0.5, "x1": count - 0.5},
    ]


def draw_same_cluster(groups: Sequence[Group]) -> Figure | None:
    """How often clients listened to their own cluster, over rounds, beside what chance would
    give.
    """
    traces: list[Any] = []
    names, when, details = [], [], []
    chance: dict[int, float] = {}
    for index, group in enumerate(groups):
        curves = mean_curve(group, _own_share)
        if curves[0]:
            names.append(as_text(group.label))
            when += curves[0]
            traces += draw_line(
                names[-1], index, *curves, columns=("method", "round", "own cluster")
            )
            details.append(f"{group.label} {sum(curves[1]) / len(curves[1]):.0%}")
        for run in group.runs[:1]:
            if not chance and (listening := peer_usage_of(run)) is not None:
                chance = _by_round(listening.round, listening.chance)
    if not traces:
        return None
    if chance:
        names.append(CHANCE)
        look = line_style(0) | {"color": BOUNDARY, "dash": "dash", "shape": "hv"}
        columns = ("method", "round", "own cluster")
        traces += draw_line(
            CHANCE, 0, list(chance), list(chance.values()), columns=columns, line=look
        )
        details.append(f"by chance {sum(chance.values()) / len(chance):.0%}")
    shape = layout(
        320,
        names,
        xaxis=round_axis(when),
        yaxis=percent_axis("own cluster"),
        hovermode="x unified",
        **mark_steps(groups),
    )
    return Figure(
        name="own-cluster",
        title="Did clients find their own kind?",
        plot=go.Figure(traces, shape),
        caption="Each line is the share of listening that went to peers of the listener's own"
        " cluster; an oracle would reach 100 %"
        f"{', and the dashed line is what chance gives' if chance else ''}.{describe_steps(groups)}",
        alt="Line chart of the share of listening within the own cluster. Mean over rounds:"
        f" {'; '.join(details)}.",
    )


def _own_share(run: Run) -> dict[int, float]:
    written = metric_curve(run, "same_cluster_share")
    listening = None if written else peer_usage_of(run)
    return _by_round(listening.round, listening.same_cluster) if listening is not None else written


def _by_round(rounds: np.ndarray, values: np.ndarray) -> dict[int, float]:
    return {
        int(round): float(value)
        for round, value in zip(rounds, values, strict=True)
        if not np.isnan(value)
    }
