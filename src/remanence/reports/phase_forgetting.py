"""Accuracy lost or gained in each phase of a round: on average, over rounds, and by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.cached import (
    class_losses,
    decomposition_of,
    first_with_losses,
    phase_means,
)
from remanence.metrics.groups import Group, class_names_of, deviation_of, mean_of
from remanence.metrics.phase_decomposition import PHASES
from remanence.reports.heatmaps import Panel, arrange_panels, change_colors
from remanence.reports.line_plots import describe_steps, mark_steps
from remanence.reports.phrases import PHASE_WORDS, label_classes
from remanence.reports.theme import (
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
SUM = "sum of the phases"
# short enough for a phone
COLUMNS = {
    "drift": "drift",
    "mixing": "peers",
    "local": "local",
    "aggregation": "aggregate",
    "server": "server",
}
POINTS = "+.3~p"  # changes of accuracy on an axis


def draw_phase_decomposition(groups: Sequence[Group]) -> Figure | None:
    """Stacked bars, one a method: what each phase of a round loses or gains on average."""
    known = [(group.label, losses) for group in groups if (losses := phase_means(group))]
    if not known:
        return None
    names = [as_text(label) for label, _ in known]
    present = [phase for phase in PHASES if any(phase in losses for _, losses in known)]
    bars = [
        _phase_bars(phase, names, [losses.get(phase, []) for _, losses in known])
        for phase in present
    ]
    sums = [sum(mean_of(values) or 0.0 for values in losses.values()) for _, losses in known]
    shape = layout(
        110 + 46 * len(known),
        [*(PHASE_WORDS[phase] for phase in present), SUM],
        barmode="relative",
        bargap=0.3,
        xaxis=axis("accuracy lost per round (negative: gained)", tickformat=POINTS)
        | {"zerolinewidth": 2},
        yaxis=axis(type="category", autorange="reversed", showgrid=False),
    )
    details = "; ".join(f"{label}: {_list_changes(losses)}" for label, losses in known)
    seeds = " Means over seeds." if any(len(group.runs) > 1 for group in groups) else ""
    return Figure(
        name="phase-decomposition",
        title="Accuracy lost by phase of a round",
        plot=go.Figure([*bars, _sum_markers(names, sums)], shape),
        caption="Accuracy lost in an average round, split into the phases of a round: to the right"
        " of zero a phase loses accuracy, to the left it gains. The bars of a method add up"
        " exactly to the diamond, which is left of zero while the model still improves."
        f"{seeds}",
        alt="Stacked bars of the accuracy lost in each phase of a round, mean over recorded"
        f" rounds and classes; negative is gained. {details}.",
    )


def _phase_bars(phase: str, names: list[str], values: Sequence[Sequence[float]]) -> Any:
    """The bars of one phase; `values` holds the losses over seeds of each method."""
    spread = [deviation_of(losses) for losses in values]
    deviation = ["deviation"] if any(spread) else []
    return go.Bar(
        name=PHASE_WORDS[phase],
        x=rounded([mean_of(losses) for losses in values]),
        y=names,
        orientation="h",
        customdata=rounded(spread) if any(spread) else None,
        marker={"color": COLORS[phase]},
        hovertemplate="%{y}: %{x:" + POINTS + "}<extra>" + PHASE_WORDS[phase] + "</extra>",
        meta={"columns": ["phase", "lost", "method", *deviation]},
    )


def _sum_markers(names: list[str], sums: Sequence[float]) -> Any:
    """A diamond for each method at the sum of its phases."""
    return go.Scatter(
        name=SUM,
        x=rounded(sums),
        y=names,
        mode="markers",
        marker={"symbol": "diamond", "size": 9, "color": "#808080"},
        hovertemplate="%{y}: %{x:" + POINTS + "}<extra>" + SUM + "</extra>",
        meta={"columns": ["phase", "lost", "method"]},
    )


def _list_changes(losses: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{PHASE_WORDS[phase]} {100 * (mean_of(values) or 0):+.1f} points"
        for phase, values in losses.items()
    )


def draw_phases_over_rounds(groups: Sequence[Group]) -> Figure | None:
    """Accuracy lost by phase in every round, for a method that the reader selects."""
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
        name="phases-over-rounds",
        title="Accuracy lost by phase, over rounds",
        plot=go.Figure(bars, shape),
        caption="Each bar is a recorded round: above zero the accuracy that its phases lose, below"
        " zero the accuracy that they gain, averaged over classes."
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
        f"{PHASE_WORDS[phase]} loses most in round {round}: {100 * value:.1f} points"
        if value > 0
        else f"{PHASE_WORDS[phase]} loses nothing in any round"
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
    """Accuracy lost by class and phase, one panel a method, with a dot where a class loses
    most.
    """
    panels, tables, details, most, longest = [], [], [], 0, 0
    for group in groups:
        losses = class_losses(group)
        if not losses:
            continue
        table = np.stack(list(losses.values()))  # [phases, C]
        classes = name_classes(class_names_of(group), table.shape[1])
        most, longest = max(most, len(classes)), max(longest, *map(len, classes))
        net = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(table, axis=0))
        cells = np.concatenate([table, net[None]]).T  # [C, phases + 1]
        tables.append(cells)
        panels.append(
            Panel(
                group.label if len(groups) > 1 else "",
                go.Heatmap(
                    name=as_text(group.label),
                    x=[*(COLUMNS[phase] for phase in losses), "sum"],
                    y=[as_text(name) for name in classes],
                    z=rounded(cells),
                    text=_mark_largest(table),
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
                f"{group.label}: {label_classes(group, table.shape[1])[label]} in"
                f" {PHASE_WORDS[list(losses)[phase]]},"
                f" {100 * table[phase, label]:.1f} points a round"
            )
    if not panels:
        return None
    return Figure(
        name="phases-by-class",
        title="Accuracy lost by class and phase",
        plot=arrange_panels(
            panels,
            max(120, min(20 * most, 420)),
            7 * longest,
            [change_colors(np.concatenate([cells.ravel() for cells in tables]))],
        ),
        caption="Rows are classes, columns the phases of a round, and the last column is their sum;"
        " orange is accuracy lost, blue is accuracy gained, averaged over recorded rounds. A dot"
        " marks the phase in which a class loses most.",
        alt="Heat map of the accuracy that every class loses in each phase of a round. The"
        f" largest losses: {'; '.join(details)}.",
    )


def _mark_largest(table: np.ndarray) -> list[list[str]]:
    """Texts for the cells: a dot for each class at the phase that loses most of it, if any does.

    [phases, C] -> [C][phases + 1]
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
