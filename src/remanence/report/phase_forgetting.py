"""Where it was lost: which phase of a round, which classes, whose training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import (
    PHASE_WORDS,
    class_losses,
    decomposition_of,
    first_with_losses,
    phase_means,
)
from remanence.metrics.groups import Group, class_names_of, deviation_of, mean_of
from remanence.metrics.phase_decomposition import PHASES
from remanence.report.heatmaps import Panel, arrange_panels, change_colors
from remanence.report.line_plots import describe_steps, mark_steps
from remanence.report.theme import (
    Figure,
    FigureState,
    as_text,
    axis,
    class_axis,
    layout,
    name_classes,
    round_axis,
    rounded,
)

# of PALETTE
COLORS = {
    "drift": "#CC79A7",
    "mixing": "#56B4E9",
    "local": "#D55E00",
    "aggregation": "#0072B2",
    "server": "#009E73",
}
TOGETHER = "all together"
# short enough for a phone
COLUMNS = {
    "drift": "drift",
    "mixing": "mixing",
    "local": "local",
    "aggregation": "merging",
    "server": "server",
}
POINTS = "+.3~p"  # changes of accuracy on an axis


def draw_phase_decomposition(groups: Sequence[Group]) -> Figure | None:
    """Stacked bars: what each phase of a round takes and gives, a bar a method."""
    known = [(group, phase_means(group)) for group in groups]
    known = [(group, losses) for group, losses in known if losses]
    if not known:
        return None
    names = [as_text(group.label) for group, _ in known]
    present = [phase for phase in PHASES if any(phase in losses for _, losses in known)]
    bars: list[Any] = []
    for phase in present:
        values = [mean_of(losses.get(phase, [])) for _, losses in known]
        spread = [deviation_of(losses.get(phase, [])) for _, losses in known]
        bars.append(
            go.Bar(
                name=PHASE_WORDS[phase],
                x=rounded(values),
                y=names,
                orientation="h",
                customdata=rounded(spread) if any(spread) else None,
                marker={"color": COLORS[phase]},
                hovertemplate="%{y}: %{x:" + POINTS + "}<extra>" + PHASE_WORDS[phase] + "</extra>",
                meta={
                    "columns": ["phase", "lost", "method", *(["deviation"] if any(spread) else [])]
                },
            )
        )
    net = [sum(mean_of(values) or 0.0 for values in losses.values()) for _, losses in known]
    bars.append(
        go.Scatter(
            name=TOGETHER,
            x=rounded(net),
            y=names,
            mode="markers",
            marker={"symbol": "diamond", "size": 9, "color": "#808080"},
            hovertemplate="%{y}: %{x:" + POINTS + "}<extra>" + TOGETHER + "</extra>",
            meta={"columns": ["phase", "lost", "method"]},
        )
    )
    legend = [*(PHASE_WORDS[phase] for phase in present), TOGETHER]
    shape = layout(
        110 + 46 * len(known),
        legend,
        barmode="relative",
        bargap=0.3,
        xaxis=axis("lost a round (negative: gained)", tickformat=POINTS, zerolinewidth=2),
        yaxis=axis(type="category", autorange="reversed", showgrid=False),
    )
    details = "; ".join(
        f"{group.label}: "
        + ", ".join(
            f"{PHASE_WORDS[phase]} {100 * (mean_of(values) or 0):+.1f} points"
            for phase, values in losses.items()
        )
        for group, losses in known
    )
    seeds = " Means over seeds." if any(len(group.runs) > 1 for group, _ in known) else ""
    return Figure(
        name="where-lost",
        title="Where it was lost",
        plot=go.Figure(bars, shape),
        caption="The change of accuracy in a round, split over its phases: to the right of zero a"
        " phase forgets, to the left it wins back. "
        "The parts add up exactly to the diamond, which is left of zero while a model"
        f" still learns.{seeds}",
        alt="Stacked bars of the accuracy lost in each phase of a round, mean over recorded"
        f" rounds and classes; negative is gained. {details}.",
    )


def draw_phases_over_rounds(groups: Sequence[Group]) -> Figure | None:
    """The same, round by round, for a method that the reader chooses."""
    known = [group for group in groups if first_with_losses(group) is not None]
    if not known:
        return None
    present = [phase for phase in PHASES if any(phase in phase_means(group) for group in known)]
    states = [_make_state(group, present) for group in known]
    bars = [
        go.Bar(
            name=PHASE_WORDS[phase],
            marker={"color": COLORS[phase]},
            hovertemplate="%{y:" + POINTS + "}",
            meta={"columns": ["phase", "round", "lost"]},
            **states[0].data[index],
        )
        for index, phase in enumerate(present)
    ]
    shape = layout(
        340,
        [PHASE_WORDS[phase] for phase in present],
        barmode="relative",
        bargap=0.1,
        hovermode="x unified",
        xaxis=round_axis([round for state in states for round in state.data[0]["x"]]),
        yaxis=axis("accuracy lost", tickformat=POINTS, zerolinewidth=2),
        **mark_steps(groups),
    )
    return Figure(
        name="lost-over-rounds",
        title="Where it was lost, round by round",
        plot=go.Figure(bars, shape),
        caption="Each bar is a recorded round: above zero what its phases forgot, below zero what"
        " they won back, averaged over classes."
        f"{describe_steps(groups)}",
        alt=states[0].alt,
        states=states,
        frame="",
    )


def _make_state(group: Group, present: Sequence[str]) -> FigureState:
    by_round: dict[str, dict[int, list[float]]] = {phase: {} for phase in present}
    for run in group.runs:
        lost = decomposition_of(run)
        for phase, part in (lost.parts if lost else {}).items():
            for round, value in zip(
                lost.round.tolist() if lost else (), nan_mean(part, axis=1).tolist(), strict=True
            ):
                by_round[phase].setdefault(round, []).append(value)
    rounds = sorted({round for values in by_round.values() for round in values})
    means = {
        phase: [mean_of(by_round[phase].get(round, [])) for round in rounds] for phase in present
    }
    worst = {
        phase: max(zip([value or 0.0 for value in values], rounds, strict=True))
        for phase, values in means.items()
    }
    details = "; ".join(
        f"{PHASE_WORDS[phase]} lost most in round {round}: {100 * value:.1f} points"
        for phase, (value, round) in worst.items()
    )
    return FigureState(
        group.label,
        "",
        [{"x": rounds, "y": rounded(means[phase])} for phase in present],
        "Bars of the accuracy lost in each phase of every recorded round of"
        f" {group.label}. {details}.",
    )


def draw_phases_by_class(groups: Sequence[Group]) -> Figure | None:
    """A map of classes and phases, a panel a method, with a dot where a class loses most."""
    panels, every, details, most, longest = [], [], [], 0, 0
    for group in groups:
        losses = class_losses(group)
        if not losses:
            continue
        table = np.stack(list(losses.values()))  # [phases, C]
        classes = name_classes(class_names_of(group), table.shape[1])
        most, longest = max(most, len(classes)), max(longest, *map(len, classes))
        net = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(table, axis=0))
        cells = np.concatenate([table, net[None]]).T  # [C, phases + 1]
        dots = _mark_largest(table)
        every.append(cells)
        panels.append(
            Panel(
                group.label if len(groups) > 1 else "",
                go.Heatmap(
                    name=as_text(group.label),
                    x=[*(COLUMNS[phase] for phase in losses), "all"],
                    y=[as_text(name) for name in classes],
                    z=rounded(cells),
                    text=dots,
                    texttemplate="%{text}" if len(classes) <= 30 else None,
                    hovertemplate="%{y}, %{x}: %{z:"
                    + POINTS
                    + "}<extra>"
                    + as_text(group.label)
                    + "</extra>",
                    meta={"columns": ["method", "phase", "class", "lost"]},
                ),
                axis(type="category", showgrid=False, tickangle=0),
                class_axis(len(classes)),
            )
        )
        if not np.isnan(table).all():
            phase, label = divmod(int(np.nanargmax(table)), table.shape[1])
            details.append(
                f"{group.label}: {classes[label]} in {PHASE_WORDS[list(losses)[phase]]},"
                f" {100 * table[phase, label]:.1f} points a round"
            )
    if not panels:
        return None
    return Figure(
        name="lost-by-class",
        title="Which classes were lost where",
        plot=arrange_panels(
            panels,
            max(120, min(20 * most, 420)),
            7 * longest,
            [change_colors(np.concatenate([cells.ravel() for cells in every]))],
        ),
        caption="Each row is a class, each column a phase of a round, the last all of them"
        " together; orange is lost, blue is won back, "
        "averaged over recorded rounds. "
        "A dot marks the phase in which a class loses most.",
        alt="Heat map of the accuracy that every class loses in each phase of a round. The"
        f" largest losses: {'; '.join(details)}.",
    )


def _mark_largest(table: np.ndarray) -> list[list[str]]:
    """A dot for each class at the phase that loses most of it, where any does. [phases, C] ->
    [C][phases + 1]
    """
    filled = np.where(np.isnan(table), -np.inf, table)
    largest = filled.argmax(axis=0)
    return [
        [
            "●" if index == largest[label] and filled[index, label] > 0 else ""
            for index in range(len(table))
        ]
        + [""]
        for label in range(table.shape[1])
    ]
