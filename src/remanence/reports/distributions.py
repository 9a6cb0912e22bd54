"""Distributions of forgetting: over rounds, over local models, and over the clients whose
training examples aggregation forgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import forgettable_of, local_forgetting_of
from remanence.metrics.forgetting import forgetting_curve
from remanence.metrics.groups import Group
from remanence.reports.heatmaps import Panel, arrange_panels, pick_frames, share_colors
from remanence.reports.theme import (
    Figure,
    as_text,
    class_axis,
    layout,
    line_style,
    percent_axis,
    round_axis,
    rounded,
)

MAX_POINTS = 200  # of a step curve: more are finer than a screen shows
MAX_CLIENTS = 60  # rows: the clients that lose most


def draw_local_distribution(groups: Sequence[Group]) -> Figure | None:
    """The distribution of local forgetting over all recorded local models."""
    values = [
        np.concatenate(
            [found.value for run in group.runs if (found := local_forgetting_of(run)) is not None]
            or [np.zeros(0)]
        )
        for group in groups
    ]
    return _draw_steps(
        groups,
        values,
        name="local-distribution",
        title="Distribution of forgetting in local training",
        caption="Cumulative distribution of local forgetting: the share of recorded local models"
        " whose training forgets at most the amount on the horizontal axis (averaged over classes,"
        " gains count as 0). Further left is better.",
        unit="local models",
        what="local forgetting over all recorded local models",
    )


def draw_global_distribution(groups: Sequence[Group]) -> Figure | None:
    """The distribution of round-wise forgetting over rounds."""
    values = [
        np.array([lost for run in group.runs for lost in forgetting_curve(run).values()])
        for group in groups
    ]
    return _draw_steps(
        groups,
        values if max(map(len, values), default=0) > 1 else [],
        name="global-distribution",
        title="Distribution of forgetting over rounds",
        caption="Cumulative distribution of round-wise forgetting: the share of rounds that forget"
        " at most the amount on the horizontal axis (averaged over classes, gains count as 0)."
        " Further left is better.",
        unit="rounds",
        what="round-wise forgetting over recorded rounds",
    )


def _draw_steps(
    groups: Sequence[Group],
    values: Sequence[np.ndarray],
    name: str,
    title: str,
    caption: str,
    unit: str,
    what: str,
) -> Figure | None:
    traces: list[Any] = []
    names, details = [], []
    highest = max(
        (float(found[~np.isnan(found)].max(initial=0.0)) for found in values), default=0.0
    )
    for index, (group, found) in enumerate(zip(groups, values, strict=bool(values))):
        known = np.sort(found[~np.isnan(found)])
        if not known.size:
            continue
        at, share = _accumulate(known, highest)
        names.append(as_text(group.label))
        traces.append(
            go.Scatter(
                name=names[-1],
                x=rounded(at),
                y=rounded(share),
                mode="lines",
                line=line_style(index) | {"shape": "hv"},
                hovertemplate="%{y:.0%} forget at most %{x:.2%}<extra>" + names[-1] + "</extra>",
                meta={"columns": ["method", "forgotten at most", "share"]},
            )
        )
        details.append(f"{group.label} {np.median(known):.1%}")
    if not traces:
        return None
    shape = layout(
        320,
        names,
        xaxis=percent_axis("forgetting"),
        yaxis=percent_axis(f"share of {unit}", range=[0, 1.02]),
    )
    return Figure(
        name=name,
        title=title,
        plot=go.Figure(traces, shape),
        caption=caption,
        alt=f"Cumulative distribution of {what}. Median: {'; '.join(details)}.",
    )


def _accumulate(known: np.ndarray, highest: float) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a cumulative distribution, from 0 to the highest value of any method.

    Returns:
        Where it rises, and the share it rises to.

    >>> _accumulate(np.array([0.25, 0.5]), 1.0)
    (array([0.  , 0.25, 0.5 , 1.  ]), array([0. , 0.5, 1. , 1. ]))
    """
    share = np.arange(1, len(known) + 1) / len(known)
    if len(known) > MAX_POINTS:
        kept = np.linspace(0, len(known) - 1, MAX_POINTS).round().astype(int)
        known, share = known[kept], share[kept]
    return np.concatenate([[0.0], known, [highest]]), np.concatenate([[0.0], share, [1.0]])


def draw_forgettable(groups: Sequence[Group]) -> Figure | None:
    """Forgettable examples by client and round: the share of a client's training examples that
    its own model classifies correctly and the aggregated model does not.
    """
    panels, details, highest, most, cut = [], [], 0.0, 0, False
    for group in groups:
        run = next((run for run in group.runs if forgettable_of(run) is not None), None)
        found = forgettable_of(run) if run is not None else None
        if found is None:
            continue
        share = found.count / np.maximum(found.evaluated, 1)
        rounds, clients = np.unique(found.round), np.unique(found.client)
        table = np.full((len(clients), len(rounds)), np.nan)
        table[np.searchsorted(clients, found.client), np.searchsorted(rounds, found.round)] = share
        kept = np.sort(np.argsort(-np.nanmean(table, axis=1), kind="stable")[:MAX_CLIENTS])
        shown = np.searchsorted(rounds, pick_frames(rounds.tolist(), len(kept), len(groups)))
        cut = cut or len(kept) < len(clients)
        highest, most = max(highest, float(share.max())), max(most, len(kept))
        cells = go.Heatmap(
            name=as_text(group.label),
            x=rounds[shown].tolist(),
            y=[str(client) for client in clients[kept]],
            z=rounded(table[np.ix_(kept, shown)], 3),
            hovertemplate="client %{y}, round %{x}: %{z:.1%}<extra>"
            + as_text(group.label)
            + "</extra>",
            meta={"columns": ["method", "round", "client", "forgettable"]},
        )
        down = class_axis(len(kept), title="client")
        panels.append(
            Panel(group.label if len(groups) > 1 else "", cells, round_axis(rounds.tolist()), down)
        )
        worst = int(np.nanargmax(np.nanmean(table, axis=1)))
        details.append(
            f"{group.label}: {found.count.sum():,} of {found.evaluated.sum():,}"
            f" ({found.count.sum() / max(found.evaluated.sum(), 1):.1%}), "
            f"most at client {clients[worst]}"
        )
    if not panels:
        return None
    return Figure(
        name="forgettable",
        title="Training examples forgotten by aggregation",
        plot=arrange_panels(
            panels, max(120, min(16 * most, 420)), 52, [share_colors(highest or 1.0)]
        ),
        caption="Rows are clients, columns rounds; brighter is a larger share of the client's"
        " training examples that its own model classifies correctly and the aggregated model does"
        f" not.{f' The {MAX_CLIENTS} clients with the largest loss are shown.' if cut else ''}"
        " Shown: the first seed.",
        alt="Heat map of the share of forgettable examples of each client in each round. In"
        f" all: {'; '.join(details)}.",
    )
