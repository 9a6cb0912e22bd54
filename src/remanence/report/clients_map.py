"""Client against client: what one client's training costs the others (F_ki), as maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.cached import ledger_of, rounds_of
from remanence.metrics.forgetting import (
    ClientForgetting,
    client_forgetting,
    client_forgetting_rounds,
)
from remanence.metrics.groups import Group, cached_per_run
from remanence.report.heatmaps import (
    Panel,
    arrange_panels,
    change_colors,
    pick_frames,
    share_colors,
)
from remanence.report.theme import Figure, FigureState, axis, class_axis, default_state, rounded
from remanence.results.run import Run

MEAN = "mean"  # F_k; a name without markup, since it is saved as CSV too


@cached_per_run
def cross_rounds(run: Run) -> list[int]:
    """The rounds in which clients' models were judged on each other's validation rows."""
    ledger = ledger_of(run)
    return client_forgetting_rounds(ledger) if ledger is not None else []


def draw_client_forgetting(groups: Sequence[Group]) -> Figure | None:
    """F_ki with F_k as the last column, beside the accuracies it comes from, for a round that
    the reader chooses.
    """
    shown = [
        (group, run)
        for group in groups
        if (run := next((run for run in group.runs if cross_rounds(run)), None)) is not None
    ]
    if not shown:
        return None
    states, every, most = [], [np.zeros(0)], 0
    for group, run in shown:
        ledger = ledger_of(run)
        assert ledger is not None
        size = client_forgetting(
            rounds_of(ledger, cross_rounds(run)[-1:])[cross_rounds(run)[-1]]
        ).clients.size
        for round, alone in rounds_of(
            ledger, pick_frames(cross_rounds(run), 2 * size * (size + 1), len(shown))
        ).items():
            found = client_forgetting(alone, round)
            every.append(found.difference.ravel())
            most = max(most, len(found.clients))
            states.append(_make_state(group, found))
    picked = default_state(states)
    names = ["Forgotten: before minus after", "Accuracy: before, and after each client's training"]
    changes, accuracies = (
        go.Heatmap(
            name=name,
            hovertemplate=template + "<extra></extra>",
            meta={"columns": ["map", "data of client", "model of client", "value"]},
            **states[picked].data[index],
        )
        for index, (name, template) in enumerate(
            zip(
                names,
                ("model of %{y}, data of %{x}: %{z:+.1%}", "model: %{y}, data of %{x}: %{z:.1%}"),
                strict=True,
            )
        )
    )
    along = axis("data of client", type="category", showgrid=False, tickangle=0)
    down = class_axis(most, title="model of client")
    panels = [
        Panel(names[0], changes, along, down),
        Panel("Accuracy before and after", accuracies, along, down),
    ]
    return Figure(
        name="client-forgetting",
        title="What one client's training costs the others",
        plot=arrange_panels(
            panels,
            max(140, min(22 * (most + 2), 440)),
            62,
            [change_colors(np.concatenate(every)), share_colors()],
        ),
        caption="Each row is a client's model after its training, each column another client's"
        " data. In the first map orange is accuracy lost "
        "against the model the round began with, and the last column is the mean over the"
        " other clients; "
        "the second shows the accuracies themselves, with the starting model on top. "
        "A diagonal that is blue among orange means: clients learn their own data and"
        " forget the others'. Shown: the first seed.",
        alt=states[picked].alt,
        states=states,
        chosen=picked,
    )


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
        f" {found.round} of {group.label}: "
        f"on average a client's training forgets {average} of the others' data and changes"
        f" its own by {gained}.",
    )
