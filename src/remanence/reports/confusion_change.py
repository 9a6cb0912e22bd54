"""Confusion change: which classes forgotten examples are predicted as."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import confusions_of_forgotten
from remanence.metrics.groups import Group, class_names_of
from remanence.reports.heatmaps import Panel, arrange_panels, share_colors
from remanence.reports.phrases import label_classes
from remanence.reports.theme import Figure, as_text, axis, class_axis, name_classes, rounded

MAX_CLASSES = 120  # with more, a map of all pairs is finer than a screen


def draw_confusion_change(groups: Sequence[Group]) -> Figure | None:
    """A heat map of true and predicted classes: what a class is predicted as when it is
    forgotten, one panel a method.
    """
    panels, details, highest, most, longest = [], [], 0.0, 0, 0
    for group in groups:
        moves = [found for run in group.runs if (found := confusions_of_forgotten(run)) is not None]
        if not moves or len(moves[0]) > MAX_CLASSES:
            continue
        table = nan_mean(np.stack(moves), axis=0)
        classes = name_classes(class_names_of(group), len(table))
        most, longest = max(most, len(classes)), max(longest, *map(len, classes))
        names = [as_text(name) for name in classes]
        table = np.where(np.eye(len(table), dtype=bool), np.nan, table)
        if np.isnan(table).all():
            continue
        highest = max(highest, float(np.nanmax(table)))
        cells = go.Heatmap(
            name=as_text(group.label),
            x=names,
            y=names,
            z=rounded(table),
            hovertemplate="%{y} predicted as %{x}: %{z:.2%}<extra>"
            + as_text(group.label)
            + "</extra>",
            meta={"columns": ["method", "predicted as", "class", "moved"]},
        )
        panels.append(
            Panel(
                group.label if len(groups) > 1 else "",
                cells,
                axis("predicted as", type="category", showgrid=False),
                class_axis(len(classes)),
            )
        )
        row, column = divmod(int(np.nanargmax(table)), len(table))
        named = label_classes(group, len(table))
        details.append(
            f"{group.label}: {named[row]} predicted as {named[column]},"
            f" {100 * table[row, column]:.2f} points a round"
        )
    if not panels:
        return None
    plot = arrange_panels(
        panels, max(140, min(22 * most, 440)), 7 * longest, [share_colors(highest or 1.0)]
    )
    plot.layout.meta["labels"] = [most, longest]
    return Figure(
        name="confusion-change",
        title="What forgotten examples are predicted as",
        plot=plot,
        caption="Rows are classes that lost accuracy, columns the classes that their examples are"
        " predicted as instead; brighter is a larger share of the class per round. A bright column"
        " is a class that absorbs examples of others.",
        alt="Heat map of what forgotten examples are predicted as. The largest entries:"
        f" {'; '.join(details)}.",
    )
