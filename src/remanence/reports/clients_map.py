"""Forgetting between clients (F_ki): what one client's training loses of the others' data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import cross_rounds, ledger_of, rounds_of
from remanence.metrics.forgetting import ClientForgetting, client_forgetting
from remanence.metrics.groups import Group
from remanence.reports.heatmaps import (
    Panel,
    arrange_panels,
    change_colors,
    pick_frames,
    share_colors,
)
from remanence.reports.theme import Figure, FigureState, axis, class_axis, default_state, rounded
from remanence.results.run import Run

MEAN = "mean"  # F_k, the last column; also a cell of the CSV file
NAMES = ("Forgotten: before minus after", "Accuracy: before, and after each client's training")
TITLES = ("Forgotten: before minus after", "Accuracy before and after")
TEMPLATES = ("model of %{y}, data of %{x}: %{z:+.1%}", "model: %{y}, data of %{x}: %{z:.1%}")


def draw_client_forgetting(groups: Sequence[Group]) -> Figure | None:
    """F_ki, with F_k as the last column, beside the two accuracies whose difference it is, for a
    round that the reader selects.
    """
    shown = [
        (group, run)
        for group in groups
        if (run := next((run for run in group.runs if cross_rounds(run)), None)) is not None
    ]
    if not shown:
        return None
    states, differences, most = [], [np.zeros(0)], 0
    for group, run in shown:
        for found in _measure_rounds(run, len(shown)):
            differences.append(found.difference.ravel())
            most = max(most, len(found.clients))
            states.append(_make_state(group, found))
    chosen = default_state(states)
    return Figure(
        name="client-forgetting",
        title="Forgetting between clients",
        plot=_plot_maps(states[chosen], most, np.concatenate(differences)),
        caption="Rows are clients' models after local training, columns the validation data of"
        " clients. First map: accuracy lost (orange) or gained (blue) against the model at the"
        " start of the round; the last column is the mean over the other clients. Second map: the"
        " accuracies themselves, with the model at the start of the round on top. A blue diagonal"
        " among orange cells shows clients that learn their own data and forget that of others."
        " Shown: the first seed.",
        alt=states[chosen].alt,
        states=states,
        chosen=chosen,
    )


def _measure_rounds(run: Run, methods: int) -> Iterator[ClientForgetting]:
    """Client forgetting in the rounds that the reader can select."""
    ledger, rounds = ledger_of(run), cross_rounds(run)
    assert ledger is not None
    size = client_forgetting(rounds_of(ledger, rounds[-1:])[rounds[-1]]).clients.size
    selected = pick_frames(rounds, 2 * size * (size + 1), methods)
    for round, part in rounds_of(ledger, selected).items():
        yield client_forgetting(part, round)


def _plot_maps(state: FigureState, most: int, differences: np.ndarray) -> Any:
    x_axis = axis("data of client", type="category", showgrid=False, tickangle=0)
    y_axis = class_axis(most, title="model of client")
    panels = [
        Panel(
            TITLES[index],
            go.Heatmap(
                name=NAMES[index],
                hovertemplate=TEMPLATES[index] + "<extra></extra>",
                meta={"columns": ["map", "data of client", "model of client", "value"]},
                **part,
            ),
            x_axis,
            y_axis,
        )
        for index, part in enumerate(state.data)
    ]
    height = max(140, min(22 * (most + 2), 440))
    return arrange_panels(panels, height, 62, [change_colors(differences), share_colors()])


def _make_state(group: Group, found: ClientForgetting) -> FigureState:
    clients = [str(client) for client in found.clients]
    gap = np.full((len(clients), 1), np.nan)
    changes = np.concatenate([found.difference, gap, found.mean[:, None]], axis=1)
    accuracies = np.concatenate([found.before[None], gap.T, found.after])
    known = found.mean[~np.isnan(found.mean)]
    average = f"{100 * known.mean():+.1f} points" if known.size else "unknown"
    own = np.diagonal(found.difference)
    gained = f"{-100 * np.nanmean(own):+.1f} points" if not np.isnan(own).all() else "unknown"
    return FigureState(
        group.label,
        str(found.round),
        [
            {"x": [*clients, " ", MEAN], "y": clients, "z": rounded(changes, 3)},
            {"x": clients, "y": ["before", " ", *clients], "z": rounded(accuracies, 3)},
        ],
        f"Heat maps of {len(clients)} clients' models on each other's data in round"
        f" {found.round} of {group.label}: on average a client's training forgets {average} of the"
        f" others' data and changes its own by {gained}.",
    )
