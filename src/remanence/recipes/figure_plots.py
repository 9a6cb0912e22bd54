"""The figures of the papers, in their layout, drawn from the CSV that `figure_data` writes.

A figure has a panel for each setting or method. The panels are made by the functions of the report.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from plotly import graph_objects as go

from remanence.reports.figure_files import render_figure
from remanence.reports.heatmaps import (
    Panel,
    arrange_panels,
    change_colors,
    panel_title,
    share_colors,
    value_colors,
)
from remanence.reports.theme import (
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
DPI = 150  # PNG, since heatmaps with many cells would be megabytes as vectors
MEAN = "mean"  # the last column of a heatmap of forgetting: the mean over the other clients' data

# x, y, and the standard deviation of y over seeds
PlotCurve = tuple[list[float], list[float], list[float | None]]


class CurvePanel(NamedTuple):
    """A panel with one curve for each method."""

    title: str
    curves: dict[str, PlotCurve]


def draw_curves(records: Sequence[FigureRecord]) -> Any:
    """Test accuracy over rounds: a panel for each setting, a curve for each method, and a band of
    one standard deviation if there are several seeds.
    """
    panels = []
    for column, own in _split(records, "column"):
        curves = {
            row: (_numbers(line, "round"), _numbers(line, "accuracy"), _deviations(line))
            for row, line in _split(own, "row")
        }
        panels.append(CurvePanel(column, curves))
    return _lay_out_lines(
        panels, axis("round", showgrid=False), axis("test accuracy", tickformat=".3~p")
    )


def draw_cdf(records: Sequence[FigureRecord]) -> Any:
    """Distributions of forgetting: a panel for each setting and each kind (global, local)."""
    panels = []
    for column, own in _split(records, "column"):
        for kind, part in _split(own, "kind"):
            setting = column.removesuffix(", global").removesuffix(", local")
            curves = {
                row: (
                    _numbers(line, "forgetting"),
                    _numbers(line, "share_at_most"),
                    _deviations(line),
                )
                for row, line in _split(part, "row")
            }
            panels.append(CurvePanel(f"{setting}: {kind} forgetting", curves))
    return _lay_out_lines(
        panels,
        percent_axis("forgotten at most"),
        percent_axis("share", range=[0, 1.02]),
        shape="hv",
    )


def draw_classes(records: Sequence[FigureRecord]) -> Any:
    """Accuracy by class over rounds: a heatmap for each method."""
    panels = [
        _heatmap(row, own, "round", "class", "accuracy", axis("round", showgrid=False))
        for row, own in _split(records, "row")
    ]
    return arrange_panels(panels, 200, 90, [share_colors()])


def draw_one_round(records: Sequence[FigureRecord]) -> Any:
    """Accuracy by class in one round: the global model before it, every client's model, and the
    global model after it.
    """
    panels = []
    for row, own in _split(records, "row"):
        named = [each | {"model": _name_model(each)} for each in own]
        panels.append(
            _heatmap(
                f"{row}, round {own[0]['round']}",
                named,
                "model",
                "class",
                "accuracy",
                axis(type="category", showgrid=False),
            )
        )
    return arrange_panels(panels, 200, 90, [share_colors()])


def draw_heatmap(records: Sequence[FigureRecord]) -> Any:
    """What each client's model forgot of each client's data in local training, with the mean over
    the other clients as last column; and its accuracy after local training.
    """
    panels, colors = [], []
    for row, own in _split(records, "row"):
        forgotten = [each | {"value": each["forgotten"]} for each in own]
        for model, part in _split(own, "model"):
            others = [
                float(each["forgotten"])
                for each in part
                if each["data"] != model and each["forgotten"]
            ]
            forgotten.append(
                {"model": model, "data": MEAN, "value": str(np.mean(others)) if others else ""}
            )
        x_axis = axis("client's data", type="category", showgrid=False)
        lost = _heatmap(
            f"{row}, round {own[0]['round']}: forgotten",
            forgotten,
            "data",
            "model",
            "value",
            x_axis,
            "client's model",
        )
        after = _heatmap(
            f"{row}: accuracy after", own, "data", "model", "after", x_axis, "client's model"
        )
        panels += [lost, after]
        colors += [
            change_colors([float(each["value"]) for each in forgotten if each["value"]]),
            share_colors(),
        ]
    return arrange_panels(panels, 220, 90, colors)


def draw_partition(records: Sequence[FigureRecord]) -> Any:
    """The number of examples of each class at each client: a heatmap for each setting."""
    most = max(_numbers(records, "examples"))
    panels = [
        _heatmap(column, own, "client", "class", "examples", axis("client", showgrid=False))
        for column, own in _split(records, "column")
    ]
    return arrange_panels(panels, 200, 90, [value_colors(0, most)])


PLOTS: dict[str, Callable[[Sequence[FigureRecord]], Any]] = {
    "cdf": draw_cdf,
    "classes": draw_classes,
    "curves": draw_curves,
    "heatmap": draw_heatmap,
    "one_round": draw_one_round,
    "partition": draw_partition,
}


def draw_figure(figure_kind: str, data: str, title: str) -> bytes | None:
    """Draw a figure as PNG from the CSV of `figure_csv`; None if it has no rows."""
    records = list(csv.DictReader(io.StringIO(data)))
    if not records:
        return None
    return render_figure(PLOTS[figure_kind](records), title, ["png"], DPI)["png"]


def _split(records: Sequence[FigureRecord], name: str) -> Iterator[tuple[str, list[FigureRecord]]]:
    """Split records by a field, in the order in which its values first appear."""
    for value in dict.fromkeys(record[name] for record in records):
        yield value, [record for record in records if record[name] == value]


def _numbers(records: Sequence[FigureRecord], name: str) -> list[float]:
    return [float(record[name]) for record in records]


def _deviations(records: Sequence[FigureRecord]) -> list[float | None]:
    return [float(record["deviation"]) if record.get("deviation") else None for record in records]


def _heatmap(
    title: str,
    records: Sequence[FigureRecord],
    across: str,
    down: str,
    value: str,
    x_axis: dict[str, Any],
    y_title: str = "",
) -> Panel:
    columns, rows = (
        list(dict.fromkeys(record[name] for record in records)) for name in (across, down)
    )
    cells = np.full((len(rows), len(columns)), np.nan)
    for record in records:
        if record[value]:
            cells[rows.index(record[down]), columns.index(record[across])] = float(record[value])
    places: list[Any] = (
        columns if x_axis.get("type") == "category" else [float(each) for each in columns]
    )
    heat = go.Heatmap(
        x=places,
        y=[as_text(each) for each in rows],
        z=rounded(cells),
        meta={"columns": [down, across, value]},
    )
    return Panel(title, heat, x_axis, class_axis(len(rows), title=y_title))


def _name_model(record: FigureRecord) -> str:
    """The name of a model with its moment in the round."""
    if record["model"] != "global":
        return record["model"]
    return {"before": "global before", "merged": "global merged"}.get(
        record["moment"], "global after"
    )


def _lay_out_lines(
    panels: Sequence[CurvePanel], across: dict[str, Any], up: dict[str, Any], shape: str = "linear"
) -> Any:
    """Panels of curves, two in each row. A method has the same color in all panels and one entry in
    the legend.
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
        for method, (x, y, deviations) in panel.curves.items():
            style = line_style(methods.index(method))
            if any(deviations):
                low, high = (
                    [
                        value + sign * (deviation or 0.0)
                        for value, deviation in zip(y, deviations, strict=True)
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
