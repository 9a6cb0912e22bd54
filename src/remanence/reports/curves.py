"""Accuracy and round-wise forgetting over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from plotly import graph_objects as go

from remanence.metrics.forgetting import forgetting_curve
from remanence.metrics.groups import Group, describe_model, mean_curve, metric_curve, primary_model
from remanence.reports.line_plots import describe_steps, draw_line, mark_steps
from remanence.reports.theme import Figure, as_text, layout, percent_axis, round_axis


def draw_accuracy(groups: Sequence[Group]) -> Figure | None:
    """Accuracy over rounds: one line a method, with a band over seeds.

    For a single method: test and validation accuracy, and the worst client where recorded.
    """
    single = len(groups) == 1
    kinds = [
        ("test", "accuracy", "test"),
        ("valid", "accuracy", "validation"),
        ("test", "worst_client", "worst client"),
    ]
    lines = [
        (group, *kind)
        for group in groups
        for kind in (kinds if single else [("test", "accuracy", "")])
    ]
    traces: list[Any] = []
    ends, names, rounds = [], [], []
    for index, (group, split, value, word) in enumerate(lines):
        curves = mean_curve(group, partial(metric_curve, value=value, split=split))
        if curves[0]:
            names.append(as_text(word or group.label))
            rounds += curves[0]
            traces += draw_line(names[-1], index, *curves)
            ends.append(f"{word or group.label} {curves[1][-1]:.1%} at round {curves[0][-1]}")
    if not traces:
        return None
    shape = layout(
        380,
        names,
        xaxis=round_axis(rounds),
        yaxis=percent_axis("accuracy"),
        hovermode="x unified",
        **mark_steps(groups),
    )
    band = (
        " The band is one standard deviation over seeds."
        if any(len(group.runs) > 1 for group in groups)
        else ""
    )
    of_what = f"of {describe_model(groups)} on {_describe_test_set(groups)}" + (
        " and on the clients' validation examples" if "validation" in names else ""
    )
    return Figure(
        name="accuracy",
        title="Accuracy over rounds",
        plot=go.Figure(traces, shape),
        caption=f"Accuracy {of_what} after each recorded round; higher is better.{band} A line that"
        " goes up and down shows classes that are forgotten and learned again."
        f"{describe_steps(groups)}",
        alt=f"Line chart of the accuracy {of_what} over rounds. Last points: {'; '.join(ends)}.",
    )


def draw_forgetting(groups: Sequence[Group]) -> Figure | None:
    """Round-wise forgetting, one line a method."""
    traces: list[Any] = []
    details, names, all_rounds = [], [], []
    for index, group in enumerate(groups):
        rounds, means, _ = mean_curve(group, forgetting_curve)
        if rounds:
            names.append(as_text(group.label))
            all_rounds += rounds
            traces += draw_line(
                names[-1], index, rounds, means, columns=("method", "round", "forgotten")
            )
            details.append(f"{group.label} {100 * sum(means) / len(means):.2f} points")
    if not traces:
        return None
    shape = layout(
        340,
        names,
        xaxis=round_axis(all_rounds),
        yaxis=percent_axis("forgetting"),
        hovermode="x unified",
        **mark_steps(groups),
    )
    return Figure(
        name="forgetting",
        title="Forgetting over rounds",
        plot=go.Figure(traces, shape),
        caption="Round-wise forgetting: the accuracy that classes lost since the previous recorded"
        " round, averaged over all classes; lower is better. Gains count as 0, so a gain on one"
        f" class does not hide a loss on another.{describe_steps(groups)}",
        alt="Line chart of round-wise forgetting over rounds. Mean over rounds:"
        f" {'; '.join(details)}.",
    )


def _describe_test_set(groups: Sequence[Group]) -> str:
    personal = any(primary_model(run) == "personal" for group in groups for run in group.runs)
    drifting = any(run.metadata.get("clusters") for group in groups for run in group.runs)
    return (
        "the test set"
        if not (personal and drifting)
        else "test examples of each client's present cluster"
    )
