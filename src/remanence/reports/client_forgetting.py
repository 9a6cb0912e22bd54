"""What the local training of each client loses of each class, as a heat map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import client_losses, first_with_losses
from remanence.metrics.groups import Group, class_names_of
from remanence.reports.heatmaps import Panel, arrange_panels, change_colors
from remanence.reports.phase_forgetting import POINTS
from remanence.reports.theme import (
    Figure,
    FigureState,
    as_text,
    axis,
    class_axis,
    name_classes,
    rounded,
)
from remanence.results.client_names import client_label

MAX_CLIENTS = 40  # rows: the clients that lose most


def draw_forgetting_by_client(groups: Sequence[Group]) -> Figure | None:
    """What local training loses by client and class, for a method that the reader selects."""
    shown = [(group, found) for group in groups if (found := client_losses(group)) is not None]
    if not shown:
        return None
    states, values, longest, most, cut = [], [], 1, 0, False
    for group, (clients, loss) in shown:
        run, total = first_with_losses(group) or group.runs[0], nan_mean(loss, axis=1)
        order = np.argsort(-np.where(np.isnan(total), -np.inf, total), kind="stable")[:MAX_CLIENTS]
        cut = cut or len(clients) > MAX_CLIENTS
        classes = name_classes(class_names_of(group), loss.shape[1])
        cells = np.concatenate([loss[order], total[order, None]], axis=1)
        longest, most = max(longest, *map(len, classes)), max(most, len(order))
        values.append(cells.ravel())
        states.append(
            FigureState(
                group.label,
                "",
                [
                    {
                        "x": [*(as_text(name) for name in classes), "all classes"],
                        "y": [as_text(client_label(run, int(client))) for client in clients[order]],
                        "z": rounded(cells, 3),
                    }
                ],
                f"Heat map of the accuracy that the local training of {len(order)} clients of"
                f" {group.label} loses on every class."
                f" {_name_worst(client_label(run, int(clients[order[0]])), total[order[0]])}",
            )
        )
    cells = go.Heatmap(
        name="lost",
        hovertemplate="%{y}, %{x}: %{z:" + POINTS + "}<extra></extra>",
        meta={"columns": ["", "class", "client", "lost"]},
        **states[0].data[0],
    )
    panel = Panel("", cells, axis(type="category", showgrid=False), class_axis(most))
    plot = arrange_panels(
        [panel], max(120, min(18 * most, 560)), 7 * 10, [change_colors(np.concatenate(values))]
    )
    plot.layout.meta["labels"] = [len(states[0].data[0]["x"]), max(longest, 11)]
    return Figure(
        name="forgetting-by-client",
        title="Accuracy lost in local training, by client and class",
        plot=plot,
        caption="Rows are clients, columns classes: orange is test accuracy that the client's local"
        " training loses of the model it received, blue is accuracy it gains. The last column is"
        " the mean over classes. Clients are sorted by that mean, the largest loss first"
        f"{f'; at most {MAX_CLIENTS} are shown' if cut else ''}. Shown: the first seed.",
        alt=states[0].alt,
        states=states,
        frame="",
    )


def _name_worst(client: str, lost: float) -> str:
    """The first client, if its local training loses accuracy."""
    if not lost > 0:
        return "No client loses accuracy on average."
    return (
        f"{client[:1].upper()}{client[1:]} loses most, {100 * lost:.1f} points a round on average."
    )
