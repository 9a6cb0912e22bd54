"""Confusion change: which classes forgotten examples are predicted as."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.confusion import confusion_change
from remanence.metrics.groups import Group, cached_per_run, class_names_of, primary_model
from remanence.report.heatmaps import Panel, arrange_panels, share_colors
from remanence.report.theme import Figure, as_text, axis, class_axis, name_classes, rounded
from remanence.results.ledger import GLOBAL, MOMENTS, SPLITS
from remanence.results.run import Run

MAX_CLASSES = 120  # with more, a map of all pairs is finer than a screen


@cached_per_run
def confusion_changes_of(run: Run) -> np.ndarray | None:
    """What examples that a model forgets from one recorded round to the next are predicted as.

    Returns:
        Shares [C, C], averaged over rounds: rows true, columns predicted; gains count as 0. None
        without recorded confusion matrices.
    """
    if run.confusions is None:
        return None
    kept = run.confusions[run.confusions["split"] == SPLITS.index("test")]
    if primary_model(run) == "personal":
        kept = kept[kept["moment"] == MOMENTS.index("personal")]
    else:
        kept = kept[kept["model"] == GLOBAL]
        after = [
            name for name in ("refined", "merged") if (kept["moment"] == MOMENTS.index(name)).any()
        ]
        kept = kept[kept["moment"] == MOMENTS.index(after[0] if after else "merged")]
    rounds = np.unique(kept["round"])
    if len(rounds) < 2:
        return None
    tables = [kept["confusion"][kept["round"] == round].sum(axis=0) for round in rounds]
    moves = [confusion_change(earlier, later) for earlier, later in pairwise(tables)]
    drops = [
        np.where(
            np.diagonal(move)[:, None] < 0,
            np.maximum(move, 0.0),
            np.where(np.isnan(move), np.nan, 0.0),
        )
        for move in moves
    ]
    return nan_mean(np.stack(drops), axis=0)


def draw_confusion_change(groups: Sequence[Group]) -> Figure | None:
    """A heat map of true and predicted classes: what a class is predicted as when it is
    forgotten, one panel a method.
    """
    panels, details, highest, most, longest = [], [], 0.0, 0, 0
    for group in groups:
        moves = [found for run in group.runs if (found := confusion_changes_of(run)) is not None]
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
        details.append(
            f"{group.label}: {classes[row]} predicted as {classes[column]},"
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
