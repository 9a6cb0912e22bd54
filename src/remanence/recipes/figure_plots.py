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

from remanence.report.figure_files import render_figure
from remanence.report.heatmaps import (
    Panel,
    arrange_panels,
    change_colors,
    panel_title,
    share_colors,
    value_colors,
)
from remanence.report.schedule import cluster_colors
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
DPI = 150  # PNG, since heatmaps with many cells would be megabytes as vectors
COLORS = 128  # of a PNG
MEAN = "mean"  # the last column of a heatmap of forgetting: the mean over the other clients' data

# x, y, and the standard deviation of y over seeds
PlotCurve = tuple[list[float], list[float], list[float | None]]


class CurvePanel(NamedTuple):
    """A panel with one curve for each method."""

    title: str
    curves: dict[str, PlotCurve]
    y_axis: dict[str, Any]  # settings of plotly's axis


def draw_curves(records: Sequence[FigureRecord]) -> Any:
    """Test accuracy over rounds: a panel for each setting, a curve for each method, and a band of
    one standard deviation if there are several seeds.
    """
    return _lay_out_lines(_round_panels(records, "accuracy"), axis("round", showgrid=False))


def draw_curves_with_loss(records: Sequence[FigureRecord]) -> Any:
    """`draw_curves`, with the test loss beside the accuracy of each setting that has one."""
    panels: list[CurvePanel] = []
    for _, own in _split(records, "column"):
        panels += _round_panels(own, "accuracy")
        panels += _round_panels([record for record in own if record.get("loss")], "loss")
    return _lay_out_lines(panels, axis("round", showgrid=False))


def draw_cdf(records: Sequence[FigureRecord]) -> Any:
    """Distributions of forgetting: a panel for each setting and each kind (global, local)."""
    panels = []
    for column, own in _split(records, "column"):
        for kind, part in _split(own, "kind"):
            setting = column.removesuffix(", global").removesuffix(", local")
            curves: dict[str, PlotCurve] = {
                row: (
                    _numbers(line, "forgetting"),
                    _numbers(line, "share_at_most"),
                    [None] * len(line),
                )
                for row, line in _split(part, "row")
            }
            share = percent_axis("share", range=[0, 1.02])
            panels.append(CurvePanel(f"{setting}: {kind} forgetting", curves, share))
    return _lay_out_lines(panels, percent_axis("forgotten at most"), shape="hv")


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
    the other clients as last column; and its accuracy after and before local training.
    """
    lost, after, before, colors = [], [], [], []
    x_axis = axis("client's data", type="category", showgrid=False)

    def draw(title: str, cells: Sequence[FigureRecord], value: str) -> Panel:
        return _heatmap(title, cells, "data", "model", value, x_axis, "client's model")

    for row, own in _split(records, "row"):
        forgotten = [*_with_means(own)]
        lost.append(draw(f"{row}, round {own[0]['round']}: forgotten", forgotten, "forgotten"))
        after.append(draw(f"{row}: accuracy after", own, "after"))
        before.append(draw(f"{row}: accuracy before", own, "before"))
        colors.append(change_colors([float(x["forgotten"]) for x in forgotten if x["forgotten"]]))
    panels = [*lost, *after, *before]  # in two columns, two methods are beside each other
    colors += [share_colors()] * (len(panels) - len(colors))
    return arrange_panels(panels, 220, 90, colors)


def _with_means(records: Sequence[FigureRecord]) -> Iterator[FigureRecord]:
    """The records, and for each model the mean of what it forgot of the other clients' data."""
    yield from records
    for model, part in _split(records, "model"):
        others = [
            float(record["forgotten"])
            for record in part
            if record["data"] != model and record["forgotten"]
        ]
        mean = str(np.mean(others)) if others else ""
        yield {"model": model, "data": MEAN, "forgotten": mean}


def draw_partition(records: Sequence[FigureRecord]) -> Any:
    """The number of examples of each class at each client: a heatmap for each setting."""
    most = max(_numbers(records, "examples"))
    panels = [
        _heatmap(column, own, "client", "class", "examples", axis("client", showgrid=False))
        for column, own in _split(records, "column")
    ]
    return arrange_panels(panels, 200, 90, [value_colors(0, most)])


def draw_drift(records: Sequence[FigureRecord]) -> Any:
    """The cluster of each client over time: a heatmap for each schedule."""
    most = max(_numbers(records, "cluster"))
    panels = [
        _heatmap(
            column,
            own,
            "client",
            "time_step",
            "cluster",
            axis("client", showgrid=False),
            "time step",
        )
        for column, own in _split(records, "column")
    ]
    return arrange_panels(panels, 200, 90, [cluster_colors(int(most) + 1)])


PLOTS: dict[str, Callable[[Sequence[FigureRecord]], Any]] = {
    "cdf": draw_cdf,
    "classes": draw_classes,
    "curves": draw_curves,
    "curves_with_loss": draw_curves_with_loss,
    "drift": draw_drift,
    "heatmap": draw_heatmap,
    "one_round": draw_one_round,
    "partition": draw_partition,
}


def draw_figure(figure_kind: str, data: str, title: str) -> bytes | None:
    """Draw a figure as PNG from the CSV of `figure_csv`; None if it has no rows."""
    records = list(csv.DictReader(io.StringIO(data)))
    if not records:
        return None
    return _reduce_colors(render_figure(PLOTS[figure_kind](records), title, ["png"], DPI)["png"])


def _reduce_colors(png: bytes) -> bytes:
    """The same picture with a palette: a third of the size."""
    from PIL import Image  # which matplotlib brings

    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS).save(small, "PNG", optimize=True)
    return small.getvalue()


def _split(records: Sequence[FigureRecord], name: str) -> Iterator[tuple[str, list[FigureRecord]]]:
    """Split records by a field, in the order in which its values first appear."""
    for value in dict.fromkeys(record[name] for record in records):
        yield value, [record for record in records if record[name] == value]


def _numbers(records: Sequence[FigureRecord], name: str) -> list[float]:
    return [float(record[name]) for record in records]


def _deviations(records: Sequence[FigureRecord], name: str) -> list[float | None]:
    return [float(record[name]) if record.get(name) else None for record in records]


def _round_panels(records: Sequence[FigureRecord], value: str) -> list[CurvePanel]:
    """A panel for each setting, of the test accuracy or the test loss over rounds."""
    deviation, y_axis = {
        "accuracy": ("deviation", axis("test accuracy", tickformat=".3~p")),
        "loss": ("loss_deviation", axis("test loss")),
    }[value]
    panels = []
    for column, own in _split(records, "column"):
        curves = {
            row: (_numbers(line, "round"), _numbers(line, value), _deviations(line, deviation))
            for row, line in _split(own, "row")
        }
        panels.append(CurvePanel(column, curves, y_axis))
    return panels


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
    panels: Sequence[CurvePanel], across: dict[str, Any], shape: str = "linear"
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
        axes[f"yaxis{number}"] = panel.y_axis | {
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
