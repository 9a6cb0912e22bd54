"""The pictures of a report. Each is a pure function of groups of runs, with a sentence on how to read it and a text for those who cannot see it.

A trace says in `meta.columns` how its data are called when saved as CSV: its name, x, y, then z or customdata. Traces without are decoration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.report.forgetting import forgetting_curve
from remanence.report.groups import Group, class_curve, curve, deviation_of, mean_class_curve, mean_curve, mean_of, nan_mean
from remanence.report.paint import (
    PALETTE,
    Picture,
    as_text,
    axis,
    class_axis,
    fade,
    layout,
    line_style,
    marker_style,
    name_classes,
    round_axis,
    rounded,
    share_axis,
    share_colours,
)
from remanence.report.partition import draw_partition

MOST_DOT_ROWS = 25  # classes; beyond, they stand side by side, in order of accuracy


def draw_accuracy(groups: Sequence[Group]) -> Picture | None:
    """Accuracy over rounds: a line a method with a band over seeds; for a single run, test and validation."""
    single = len(groups) == 1
    kinds = [("test", "test"), ("valid", "validation")] if single else [("test", "")]
    lines = [(group, split, word) for group in groups for split, word in kinds]
    traces: list[Any] = []
    ends, names, when = [], [], []
    for place, (group, split, word) in enumerate(lines):
        curves = mean_curve(group, partial(curve, split=split))
        if curves[0]:
            names.append(as_text(word or group.label))
            when += curves[0]
            traces += _line_with_band(names[-1], place, *curves, "accuracy")
            ends.append(f"{word or group.label} {curves[1][-1]:.1%} at round {curves[0][-1]}")
    if not traces:
        return None
    shape = layout(380, names, xaxis=round_axis(when), yaxis=share_axis("accuracy"), hovermode="x unified")
    band = " The band is one standard deviation over seeds." if any(len(group.runs) > 1 for group in groups) else ""
    of_what = "of the global model on the test set" + (" and on the clients' validation rows" if len(names) > 1 and single else "")
    return Picture(
        name="accuracy",
        title="Accuracy over rounds",
        figure=go.Figure(traces, shape),
        reading=f"Higher is better: each line is the accuracy {of_what} after each recorded round.{band} "
        "A jagged line forgets and learns again.",
        alt=f"Line chart of the accuracy {of_what} over rounds. Last points: {'; '.join(ends)}.",
    )


def draw_classes_over_rounds(groups: Sequence[Group]) -> Picture | None:
    """A heat map of the accuracy per class over rounds, one panel a method."""
    traces: list[Any] = []
    axes: dict[str, Any] = {}
    titles, facts, most, longest = [], [], 0, 0
    shown = [(group, *mean_class_curve(group)) for group in groups]
    shown = [entry for entry in shown if len(entry[1])]
    for place, (group, rounds, shares) in enumerate(shown):
        number = "" if place == 0 else str(place + 1)
        classes = name_classes(_class_names(group), shares.shape[1])
        most, longest = max(most, len(classes)), max(longest, *map(len, classes))
        top = 1 - place / len(shown)
        axes[f"xaxis{number}"] = round_axis(rounds.tolist(), anchor=f"y{number}", automargin=False)
        axes[f"yaxis{number}"] = class_axis(len(classes), anchor=f"x{number}", domain=[top - 0.7 / len(shown), top])
        traces.append(
            go.Heatmap(
                name=as_text(group.label),
                x=rounds.tolist(),
                y=[as_text(name) for name in classes],
                z=rounded(shares.T),
                xaxis=f"x{number}",
                yaxis=f"y{number}",
                coloraxis="coloraxis",
                hovertemplate="%{y}, round %{x}: %{z:.1%}<extra>" + as_text(group.label) + "</extra>",
                meta={"columns": ["method", "round", "class", "accuracy"]},
            )
        )
        titles.append(_panel_title(group.label, number) if len(groups) > 1 else None)
        facts.append(f"{group.label}: {_name_extremes(classes, shares[-1])}")
    if not traces:
        return None
    panel = max(120, min(20 * most, 420))
    meta = {"panels": len(traces), "panel": panel, "gap": 7 * longest}
    shape = layout(
        len(traces) * (panel + 80) + 60,
        annotations=[title for title in titles if title],
        coloraxis=share_colours(),
        meta=meta,
        **axes,
    )
    seeds = " Mean over seeds." if any(len(group.runs) > 1 for group in groups) else ""
    return Picture(
        name="classes-over-rounds",
        title="Every class over rounds",
        figure=go.Figure(traces, shape),
        reading="Each row is a class, each column a recorded round; brighter is more accurate. "
        f"A bright row that turns dark is a class being forgotten.{seeds}",
        alt=f"Heat map of the accuracy of every class over rounds. At the last round, {'; '.join(facts)}.",
    )


def draw_classes_at_end(groups: Sequence[Group]) -> Picture | None:
    """Accuracy per class at the last recorded round: a row a class, a dot a method."""
    found = []
    for group in groups:
        ends = [shares[-1] for rounds, shares in (class_curve(run) for run in group.runs) if len(rounds)]
        if ends:
            found.append((group, name_classes(_class_names(group), len(ends[0])), np.array(ends)))  # [seeds, C]
    if not found:
        return None
    upright = len(found[0][1]) > MOST_DOT_ROWS
    typical = {
        name: mean_of(_share_of(name, classes, ends) for _, classes, ends in found) or 0.0 for _, classes, _ in found for name in classes
    }
    order = sorted(typical, key=lambda name: typical[name]) if upright else list(typical)
    traces = [_dots(group, place, classes, ends, order, upright) for place, (group, classes, ends) in enumerate(found)]
    along = axis(
        type="category", categoryorder="array", categoryarray=[as_text(name) for name in order], autorange=None if upright else "reversed"
    )
    values = share_axis("accuracy", range=[-0.02, 1.02])
    names = [as_text(group.label) for group, _, _ in found]
    shape = layout(
        420 if upright else max(200, 70 + len(order) * (18 + 9 * len(found))),
        names,
        xaxis=along if upright else values,
        yaxis=values if upright else along,
        scattermode="group",
        scattergap=0.35,
    )
    bars = " Bars are one standard deviation over seeds." if not upright and any(len(ends) > 1 for _, _, ends in found) else ""
    sorted_by = ", from the hardest class to the easiest" if upright else ""
    facts = "; ".join(f"{group.label}: {_name_extremes(classes, nan_mean(ends, axis=0))}" for group, classes, ends in found)
    return Picture(
        name="classes-at-end",
        title="Every class at the end",
        figure=go.Figure(traces, shape),
        reading=f"Each dot is the accuracy on one class after the last recorded round{sorted_by}: "
        f"a dot far below the others is a class that a method neglects.{bars}",
        alt=f"Dot plot of the accuracy of every class after the last recorded round. {facts}.",
    )


def draw_forgetting(groups: Sequence[Group]) -> Picture | None:
    """Round-wise forgetting over rounds."""
    traces: list[Any] = []
    facts, names, when = [], [], []
    for place, group in enumerate(groups):
        rounds, means, _ = mean_curve(group, forgetting_curve)
        if rounds:
            names.append(as_text(group.label))
            when += rounds
            traces += _line_with_band(names[-1], place, rounds, means, [None] * len(rounds), "forgotten")
            facts.append(f"{group.label} {100 * sum(means) / len(means):.2f} points")
    if not traces:
        return None
    return Picture(
        name="forgetting",
        title="What each round forgot",
        figure=go.Figure(traces, layout(340, names, xaxis=round_axis(when), yaxis=share_axis("forgotten"), hovermode="x unified")),
        reading="Lower is better: the accuracy that classes lost since the recorded round before, averaged over all classes. "
        "Gains count as 0, so a class won does not hide a class lost.",
        alt=f"Line chart of round-wise forgetting over rounds. Mean over rounds: {'; '.join(facts)}.",
    )


FIGURES: tuple[Callable[[Sequence[Group]], Picture | None], ...] = (
    draw_accuracy,
    draw_forgetting,
    draw_classes_over_rounds,
    draw_classes_at_end,
    draw_partition,
)  # the page shows them in this order; None: nothing to draw


def _line_with_band(
    name: str, place: int, rounds: list[int], means: list[float], deviations: Sequence[float | None], value: str
) -> list[Any]:
    colour = PALETTE[place % len(PALETTE)]
    with_band = [(r, m, d) for r, m, d in zip(rounds, means, deviations, strict=True) if d is not None]
    line = go.Scatter(
        name=name,
        x=rounds,
        y=rounded(means),
        customdata=rounded(deviations) if with_band else None,
        mode="lines" if len(rounds) > 1 else "markers",
        line=line_style(place),
        legendgroup=name,
        hovertemplate="%{y:.1%}" + (" ± %{customdata:.1%}" if with_band else ""),
        meta={"columns": ["method", "round", value, *(["deviation"] if with_band else [])]},
    )
    if not with_band:
        return [line]
    edge = [m + d for _, m, d in with_band] + [m - d for _, m, d in reversed(with_band)]
    when = [r for r, _, _ in with_band]
    band = go.Scatter(
        x=when + when[::-1], y=rounded(edge), fill="toself", fillcolor=fade(colour, 0.16), line={"width": 0}, mode="lines",
        hoverinfo="skip", showlegend=False, legendgroup=name,
    )  # fmt: skip
    return [band, line]


def _dots(group: Group, place: int, classes: list[str], ends: np.ndarray, order: list[str], upright: bool) -> Any:
    by_name = {name: ends[:, column] for column, name in enumerate(classes)}
    there = [name for name in order if name in by_name]
    values = rounded([_share_of(name, classes, ends) for name in there])
    names = [as_text(name) for name in there]
    spread = rounded([deviation_of(by_name[name][~np.isnan(by_name[name])]) for name in there])
    bars = {
        "type": "data",
        "array": [value or 0 for value in spread],
        "thickness": 1.2,
        "width": 0,
        "visible": not upright and len(ends) > 1,
    }
    return go.Scatter(
        name=as_text(group.label),
        x=names if upright else values,
        y=values if upright else names,
        error_x=None if upright else bars,
        customdata=spread if len(ends) > 1 else None,
        mode="markers",
        orientation="v" if upright else "h",
        marker=marker_style(place) | ({"size": 6} if upright else {}),
        hovertemplate=("%{x}: %{y:.1%}" if upright else "%{y}: %{x:.1%}") + "<extra>" + as_text(group.label) + "</extra>",
        meta={
            "columns": ["method", *(["class", "accuracy"] if upright else ["accuracy", "class"]), *(["deviation"] if len(ends) > 1 else [])]
        },
    )


def _panel_title(label: str, number: str) -> dict[str, Any]:
    place = {"xref": f"x{number} domain", "yref": f"y{number} domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return {"text": f"<b>{as_text(label)}</b>", "showarrow": False, **place}


def _class_names(group: Group) -> list[object]:
    return next((list(run.about["class_names"]) for run in group.runs if run.about.get("class_names")), [])


def _share_of(name: str, classes: list[str], ends: np.ndarray) -> float | None:
    """A class' mean accuracy over seeds; None for a class that is not there or has no examples."""
    if name not in classes:
        return None
    mean = float(nan_mean(ends[:, classes.index(name)], axis=0))
    return None if np.isnan(mean) else mean


def _name_extremes(classes: list[str], shares: np.ndarray) -> str:
    known = [(float(share), name) for share, name in zip(shares, classes, strict=True) if not np.isnan(share)]
    if not known:
        return "no class was evaluated"
    (low, worst), (high, best) = min(known), max(known)
    return f"best class {best} {high:.0%}, worst class {worst} {low:.0%}"
