"""Annotations of a figure on paper: lines between time steps, texts, color bars."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from remanence.reports.matplotlib_marks import MplPanel
from remanence.reports.matplotlib_values import POINTS, as_list, plain_text, read_color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 8  # points of text


def draw_shapes(panels: dict[tuple[str, str], MplPanel], layout: dict[str, Any]) -> None:
    """Lines behind the marks, such as those between time steps."""
    from matplotlib.lines import Line2D

    for shape in layout.get("shapes") or ():
        if shape.get("type") != "line":
            raise NotImplementedError(f"figures for paper support lines, not {shape.get('type')}")
        panel, transform = _find_panel(panels, shape)
        x0, x1 = (
            panel.x_scale.positions([shape.get("x0"), shape.get("x1")])
            if panel.x_scale.names is None
            else (shape["x0"], shape["x1"])
        )
        y0, y1 = (
            panel.y_scale.positions([shape.get("y0"), shape.get("y1")])
            if panel.y_scale.names is None
            else (shape["y0"], shape["y1"])
        )
        line = shape.get("line") or {}
        dashes: Any = {"dash": "--", "dot": ":", "dashdot": "-."}
        panel.ax.add_line(
            Line2D(
                [x0, x1],
                [y0, y1],
                transform=transform,
                color=read_color(line.get("color") or "#9a9a9a"),
                linewidth=float(line.get("width") or 1) * POINTS,
                linestyle=dashes.get(str(line.get("dash")), "-"),
                zorder=1,
            )
        )


def write_annotations(panels: dict[tuple[str, str], MplPanel], layout: dict[str, Any]) -> None:
    """Titles of panels, and texts at positions."""
    for note in layout.get("annotations") or ():
        panel, transform = _find_panel(panels, note)
        text = plain_text(note.get("text") or "")
        x: Any = (
            panel.x_scale.names.get(plain_text(note["x"]), note["x"])
            if panel.x_scale.names and isinstance(note["x"], str)
            else note["x"]
        )
        y: Any = (
            panel.y_scale.names.get(plain_text(note["y"]), note["y"])
            if panel.y_scale.names and isinstance(note["y"], str)
            else note["y"]
        )
        if re.fullmatch(r"x\d*", str(note.get("xref"))) and not min(panel.ax.get_xlim()) <= float(
            x
        ) <= max(panel.ax.get_xlim()):
            continue  # outside the axis, such as a time step without data
        above = (
            note.get("yanchor") == "bottom"
            and y == 1
            and ("domain" in str(note.get("yref")) or note.get("yref") == "paper")
        )
        if above and "domain" in str(note.get("xref")):
            panel.ax.set_title(text, loc={0: "left", 1: "right"}.get(x, "center"), pad=3)
            continue
        side = {"left": "left", "right": "right"}.get(str(note.get("xanchor")), "center")
        height = {"top": "top", "bottom": "bottom"}.get(
            str(note.get("yanchor")), "bottom" if note.get("showarrow", True) else "center"
        )
        size = SIZE - 1 if (note.get("font") or {}).get("size", 13) <= 12 else SIZE
        panel.ax.text(
            x,
            y,
            text,
            transform=transform,
            ha=side,
            va=height,
            fontsize=size,
            clip_on=False,
        )


def _find_panel(
    panels: dict[tuple[str, str], MplPanel], item: dict[str, Any]
) -> tuple[MplPanel, Any]:
    """The panel of a shape or an annotation, and the transform of its coordinates."""
    from matplotlib.transforms import blended_transform_factory

    x, y = str(item.get("xref") or "paper"), str(item.get("yref") or "paper")
    wanted = [re.sub(r" domain$", "", ref) for ref in (x, y)]
    panel = next(
        (
            panel
            for pair, panel in panels.items()
            if all(want in ("paper", have) for want, have in zip(wanted, pair, strict=True))
        ),
        next(iter(panels.values())),
    )
    share = {True: panel.ax.transAxes, False: panel.ax.transData}
    return panel, blended_transform_factory(
        share["domain" in x or x == "paper"], share["domain" in y or y == "paper"]
    )


def add_color_bars(
    paper: Figure, panels: dict[tuple[str, str], MplPanel], layout: dict[str, Any]
) -> None:
    """One color bar for maps that share a scale, and one for each map with its own."""
    owners: dict[str, list[tuple[Any, Any]]] = {}
    for place, panel in enumerate(panels.values()):
        for mesh in panel.ax.collections:
            gid = mesh.get_gid()
            if gid and gid != "none":
                owners.setdefault(gid if gid != "own" else f"own {place}", []).append(
                    (panel.ax, mesh)
                )
    for name, pairs in owners.items():
        style = layout.get(name, {}).get("colorbar") or {}
        bar = paper.colorbar(
            pairs[0][1],
            ax=[ax for ax, _ in pairs],
            location="right",
            fraction=0.06,
            pad=0.02,
            aspect=24,
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2)
        form = str(style.get("tickformat") or "")
        if form.endswith(("p", "%")):
            bar.ax.yaxis.set_major_formatter(
                write_signed if form.startswith("+") else write_percent
            )
        if style.get("tickvals") is not None:
            bar.set_ticks(
                as_list(style["tickvals"]),
                labels=[plain_text(text) for text in as_list(style.get("ticktext"))] or None,
            )


def write_percent(value: float, position: float = 0) -> str:
    """A share as a tick label; matplotlib passes the position of the tick too.

    >>> write_percent(0.25), write_percent(0.125)
    ('25%', '12.5%')
    """
    return f"{round(100 * value, 6):g}%"


def write_signed(value: float, position: float = 0) -> str:
    """As `write_percent`, with a plus sign."""
    return ("+" if value > 0 else "") + write_percent(value)
