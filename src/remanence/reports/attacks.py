"""The section on attacks: tables of robustness and of rejected replies, accuracy of rare classes,
and attack success.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.groups import (
    Group,
    class_curve,
    class_names_of,
    mean_curve,
    metric_curve,
)
from remanence.metrics.robustness import (
    ClientIssue,
    client_issues,
    count_holders,
    has_attacks,
    is_attacked,
    is_defended,
    robustness_row,
)
from remanence.reports.line_plots import draw_line, mark_steps
from remanence.reports.phrases import label_classes
from remanence.reports.table_columns import MISSING, percent
from remanence.reports.theme import (
    Figure,
    as_text,
    axis,
    layout,
    marker_style,
    name_classes,
    percent_axis,
    round_axis,
    rounded,
)
from remanence.results.run import Run

MAX_LISTED = 50  # rows in the table of rejected replies


def tabulate(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The tables of the section: numbers under attack, then rejected replies.

    Returns:
        For each table its caption, headings and rows of texts; empty without attacks.
    """
    if not has_attacks(groups):
        return []
    numbers = [robustness_row(group) for group in groups]
    headings = [
        "Method",
        "Attack",
        "Accuracy, %",
        "Accuracy on rare classes, %",
        "Forgetting, points a round",
        "of rare classes, points",
        "Attack success, %",
    ]
    rows = [
        [
            s.label,
            s.attack,
            percent(s.accuracy),
            percent(s.rare),
            percent(s.forgetting, 2),
            percent(s.rare_forgetting, 2),
            percent(s.success),
        ]
        for s in numbers
    ]
    tables = [
        {
            "caption": "Methods under attack; rare classes are the third of the classes that the"
            " fewest clients hold",
            "headings": headings,
            "rows": rows,
        }
    ]
    listed = [
        (group, run, issue)
        for group in groups
        for run in group.runs
        for issue in client_issues(run)
    ]
    if listed:
        more = f" (the first {MAX_LISTED} of {len(listed)})" if len(listed) > MAX_LISTED else ""
        tables.append(
            {
                "caption": f"Rejected and missing replies{more}; none changed a model",
                "headings": ["Method", "Seed", "Client", "Code", "Times", "Rounds", "Reason"],
                "rows": [
                    _describe_issue(group, run, issue) for group, run, issue in listed[:MAX_LISTED]
                ],
            }
        )
    return tables


def _describe_issue(group: Group, run: Run, issue: ClientIssue) -> list[str]:
    first, last = issue.rounds[0], issue.rounds[-1]
    client = (
        f"{issue.client} (attacker)"
        if issue.attacker
        else str(issue.client)
        if issue.client >= 0
        else "unknown"
    )
    rounds = str(first) if first == last else f"{first} to {last}"
    return [
        group.label,
        str(run.config.seed),
        client,
        issue.code,
        str(len(issue.rounds)),
        rounds,
        issue.reason or MISSING,
    ]


def draw_rare_classes(groups: Sequence[Group]) -> Figure | None:
    """Accuracy per class at the end, from the class that the fewest clients hold to the one that
    most hold; only with an attack or a robust aggregator.
    """
    runs = [run for group in groups for run in group.runs]
    if not any(is_attacked(run) or is_defended(run) for run in runs):
        return None
    first = next(
        (run for run in runs if run.metadata["label_counts"] and len(class_curve(run)[0])), None
    )
    if first is None:
        return None
    order = np.argsort(count_holders(first.metadata["label_counts"]), kind="stable")
    traces, details = [], []
    for index, group in enumerate(groups):
        accuracies = _final_accuracies(group, len(order))
        if accuracies is None:
            continue
        accuracies = accuracies[order]
        labels = np.array(name_classes(class_names_of(group), len(order)))[order]
        names = [as_text(name) for name in labels]
        traces.append(_class_markers(group, index, names, accuracies))
        named = [label_classes(group, len(order))[place] for place in (order[0], order[-1])]
        details.append(
            f"{group.label} {accuracies[0]:.0%} on {named[0]}, {accuracies[-1]:.0%} on {named[1]}"
        )
    if not traces:
        return None
    shape = layout(
        360,
        [trace.name for trace in traces],
        xaxis=axis("class, from the one that the fewest clients hold", type="category"),
        yaxis=percent_axis("accuracy", range=[-0.02, 1.02]),
        scattermode="group",
        scattergap=0.35,
    )
    return Figure(
        name="rare-classes",
        title="Accuracy of classes that few clients hold",
        plot=go.Figure(traces, shape),
        caption="Accuracy of each class after the last recorded round. A robust aggregator whose"
        " dots on the left lie below the others discards the replies of clients that hold these"
        " classes.",
        alt="Dot plot of the accuracy of every class, ordered by how many clients hold it."
        f" {'; '.join(details)}.",
    )


def _final_accuracies(group: Group, count: int) -> np.ndarray | None:
    """Accuracy per class after the last recorded round, the mean over seeds [C]."""
    curves = [accuracies for rounds, accuracies in map(class_curve, group.runs) if len(rounds)]
    ends = [accuracies[-1] for accuracies in curves if accuracies.shape[1] == count]
    return nan_mean(np.array(ends), axis=0) if ends else None


def _class_markers(group: Group, index: int, names: list[str], accuracies: np.ndarray) -> Any:
    return go.Scatter(
        name=as_text(group.label),
        x=names,
        y=rounded(accuracies),
        mode="markers",
        marker=marker_style(index),
        hovertemplate="%{x}: %{y:.1%}<extra>" + as_text(group.label) + "</extra>",
        meta={"columns": ["method", "class", "accuracy"]},
    )


def draw_success(groups: Sequence[Group]) -> Figure | None:
    """Attack success over rounds, for attacks whose success can be measured."""
    traces: list[Any] = []
    names, all_rounds, details = [], [], []
    for index, group in enumerate(groups):
        rounds, means, spread = mean_curve(group, partial(metric_curve, value="attack_success"))
        if rounds:
            names.append(as_text(group.label))
            all_rounds += rounds
            traces += draw_line(
                names[-1], index, rounds, means, spread, columns=("method", "round", "success")
            )
            details.append(f"{group.label} {means[-1]:.0%}")
    if not traces:
        return None
    return Figure(
        name="attack-success",
        title="Attack success over rounds",
        plot=go.Figure(
            traces,
            layout(
                320,
                names,
                xaxis=round_axis(all_rounds),
                yaxis=percent_axis("success"),
                hovermode="x unified",
                **mark_steps(groups),
            ),
        ),
        caption="Share of the attack's test examples, such as images with its trigger, that get the"
        " label that the attacker wants; lower is better.",
        alt=f"Line chart of the attack's success over rounds. At the end: {'; '.join(details)}.",
    )
