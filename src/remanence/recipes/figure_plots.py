"""A figure of a paper, in its layout: a panel for each setting or each method, drawn from the data
that `figure_data.py` writes.

The panels are made as the report makes its own, and the report's pen for paper draws them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from plotly import graph_objects as go

from remanence.report.figure_files import render_figure
from remanence.report.heatmaps import (
    Panel,
    arrange_panels,
    change_colors,
    panel_title,
    share_colors,
    value_colors,
)
from remanence.report.theme import (
    as_text,
    axis,
    class_axis,
    layout,
    line_style,
    percent_axis,
    rounded,
    with_alpha,
)

FigureRecord = dict[str, str]
DOTS = 150  # per inch: maps of many cells would be megabytes as vectors
MEAN = "mean"  # the last column of a map of forgetting: what a model forgot of all others' data

PlotCurve = tuple[
    list[float], list[float], list[float | None]
]  # x, y, and how far y varies over seeds


class CurvePanel(NamedTuple):
    """A panel of curves, one a method."""

    title: str
    curves: dict[str, PlotCurve]


def draw_curves(records: Sequence[FigureRecord]) -> Any:
    """Test accuracy over rounds: a panel for each setting, a line for each method, with a band
    where there are several seeds.
    """
    panels = []
    for column, mine in _split(records, "column"):
        curves = {
            row: (_numbers(line, "round"), _numbers(line, "accuracy"), _deviations(line))
            for row, line in _split(mine, "row")
        }
        panels.append(CurvePanel(column, curves))
    return _lay_out_lines(
        panels, axis("round", showgrid=False), axis("test accuracy", tickformat=".3~p")
    )


def draw_cdf(records: Sequence[FigureRecord]) -> Any:
    """How forgetting is spread, over rounds and over local models: a panel for each setting and
    kind.
    """
    panels = []
    for column, mine in _split(records, "column"):
        for kind, some in _split(mine, "kind"):
            setting = column.removesuffix(", global").removesuffix(", local")
            curves = {
                row: (
                    _numbers(line, "forgetting"),
                    _numbers(line, "share_at_most"),
                    _deviations(line),
                )
                for row, line in _split(some, "row")
            }
            panels.append(CurvePanel(f"{setting}: {kind} forgetting", curves))
    return _lay_out_lines(
        panels,
        percent_axis("forgotten at most"),
        percent_axis("share", range=[0, 1.02]),
        shape="hv",
    )


def draw_classes(records: Sequence[FigureRecord]) -> Any:
    """The accuracy of every class over rounds: a map for each method."""
    panels = [
        _map(row, mine, "round", "class", "accuracy", axis("round", showgrid=False))
        for row, mine in _split(records, "row")
    ]
    return arrange_panels(panels, 200, 90, [share_colors()])


def draw_one_round(records: Sequence[FigureRecord]) -> Any:
    """One round: the global model before it, every client's after training, the global model
    after it.
    """
    panels = []
    for row, mine in _split(records, "row"):
        named = [each | {"model": _name_model(each)} for each in mine]
        panels.append(
            _map(
                f"{row}, round {mine[0]['round']}",
                named,
                "model",
                "class",
                "accuracy",
                axis(type="category", showgrid=False),
            )
        )
    return arrange_panels(panels, 200, 90, [share_colors()])


def draw_heatmap(records: Sequence[FigureRecord]) -> Any:
    """What each client's model forgot of each client's data in local training, with the mean
    over the others' as last column, and what it knows after it.
    """
    panels, colors = [], []
    for row, mine in _split(records, "row"):
        forgotten = [each | {"value": each["forgotten"]} for each in mine]
        for model, some in _split(mine, "model"):
            others = [
                float(each["forgotten"])
                for each in some
                if each["data"] != model and each["forgotten"]
            ]
            forgotten.append(
                {"model": model, "data": MEAN, "value": str(np.mean(others)) if others else ""}
            )
        words = axis("client's data", type="category", showgrid=False)
        lost = _map(
            f"{row}, round {mine[0]['round']}: forgotten",
            forgotten,
            "data",
            "model",
            "value",
            words,
            "client's model",
        )
        after = _map(
            f"{row}: accuracy after", mine, "data", "model", "after", words, "client's model"
        )
        panels += [lost, after]
        colors += [
            change_colors([float(each["value"]) for each in forgotten if each["value"]]),
            share_colors(),
        ]
    return arrange_panels(panels, 220, 90, colors)


def draw_partition(records: Sequence[FigureRecord]) -> Any:
    """How many examples of each class each client has: a map for each setting."""
    most = max(_numbers(records, "examples"))
    panels = [
        _map(column, mine, "client", "class", "examples", axis("client", showgrid=False))
        for column, mine in _split(records, "column")
    ]
    return arrange_panels(panels, 200, 90, [value_colors(0, most)])


DRAWINGS: dict[str, Callable[[Sequence[FigureRecord]], Any]] = {
    "cdf": draw_cdf,
    "classes": draw_classes,
    "curves": draw_curves,
    "heatmap": draw_heatmap,
    "one_round": draw_one_round,
    "partition": draw_partition,
}


def draw_figure(draws: str, data: str, title: str) -> bytes | None:
    """-> PNG; None where nothing was recorded of it. data: CSV, as `figure_csv` writes it"""
    records = list(csv.DictReader(io.StringIO(data)))
    return render_figure(DRAWINGS[draws](records), title, ["png"], DOTS)["png"] if records else None


def _split(records: Sequence[FigureRecord], name: str) -> Iterator[tuple[str, list[FigureRecord]]]:
    """By a field, in the order in which its values first come."""
    for value in dict.fromkeys(record[name] for record in records):
        yield value, [record for record in records if record[name] == value]


def _numbers(records: Sequence[FigureRecord], name: str) -> list[float]:
    return [float(record[name]) for record in records]


def _deviations(records: Sequence[FigureRecord]) -> list[float | None]:
    return [float(record["deviation"]) if record.get("deviation") else None for record in records]


def _map(
    title: str,
    records: Sequence[FigureRecord],
    across: str,
    down: str,
    value: str,
    words: dict[str, Any],
    beside: str = "",
) -> Panel:
    columns, rows = (
        list(dict.fromkeys(record[name] for record in records)) for name in (across, down)
    )
    cells = np.full((len(rows), len(columns)), np.nan)
    for record in records:
        if record[value]:
            cells[rows.index(record[down]), columns.index(record[across])] = float(record[value])
    places: list[Any] = (
        columns if words.get("type") == "category" else [float(each) for each in columns]
    )
    heat = go.Heatmap(
        x=places,
        y=[as_text(each) for each in rows],
        z=rounded(cells),
        meta={"columns": [down, across, value]},
    )
    return Panel(title, heat, words, class_axis(len(rows), title=beside))


def _name_model(record: FigureRecord) -> str:
    """Where a model stands in a round, in the order of the round."""
    if record["model"] != "global":
        return record["model"]
    return {"before": "global before", "merged": "global merged"}.get(
        record["moment"], "global after"
    )


def _lay_out_lines(
    panels: Sequence[CurvePanel], across: dict[str, Any], up: dict[str, Any], shape: str = "linear"
) -> Any:
    """Panels of curves, two in a row; a method has one color in all of them, and stands in the
    legend once.
    """
    methods = list(dict.fromkeys(method for panel in panels for method in panel.curves))
    rows, wide = -(-len(panels) // 2), 2 if len(panels) > 1 else 1
    traces: list[Any] = []
    axes: dict[str, Any] = {}
    for place, panel in enumerate(panels):
        (row, column), number = divmod(place, wide), "" if place == 0 else str(place + 1)
        axes[f"xaxis{number}"] = across | {
            "anchor": f"y{number}",
            "domain": [column / wide, (column + 0.92) / wide],
        }
        axes[f"yaxis{number}"] = up | {
            "anchor": f"x{number}",
            "domain": [1 - (row + 0.8) / rows, 1 - row / rows],
        }
        where = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        for method, (x, y, around) in panel.curves.items():
            style = line_style(methods.index(method))
            if any(around):
                low, high = (
                    [
                        value + sign * (deviation or 0.0)
                        for value, deviation in zip(y, around, strict=True)
                    ]
                    for sign in (-1, 1)
                )
                band = {
                    "x": [*x, *reversed(x)],
                    "y": [*high, *reversed(low)],
                    "fill": "toself",
                    "fillcolor": with_alpha(style["color"], 0.2),
                }
                traces.append(
                    go.Scatter(**band, line={"width": 0}, mode="lines", showlegend=False, **where)
                )
            traces.append(
                go.Scatter(
                    name=as_text(method),
                    x=x,
                    y=rounded(y),
                    mode="lines",
                    line=style | {"shape": shape},
                    **where,
                )
            )
    titles = [
        panel_title(panel.title, "" if place == 0 else str(place + 1))
        for place, panel in enumerate(panels)
    ]
    return go.Figure(traces, layout(320 * rows, methods, annotations=titles, **axes))
