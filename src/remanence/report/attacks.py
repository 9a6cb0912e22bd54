"""Hostile clients: who was refused and why, what an attack and a defence do to the classes that few
clients hold, and how often the attack gets its way.

A robust aggregator takes the unusual for the hostile. Whoever alone holds a class is unusual, so
the price of a defence shows in these classes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from plotly import graph_objects as go

from remanence.aggregators.robust import ROBUST
from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.forgetting import class_drops
from remanence.metrics.groups import (
    Group,
    class_curve,
    class_names_of,
    last_value,
    mean_curve,
    mean_of,
    metric_curve,
)
from remanence.report.line_plots import draw_line, mark_steps
from remanence.report.table_columns import MISSING, percent
from remanence.report.theme import (
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

RARE = 1 / 3  # share of the classes, those that the fewest clients hold
MAX_LISTED = 50  # clients and codes in the table of refusals


def has_attacks(groups: Sequence[Group]) -> bool:
    """Is there anything to tell: an attack, a defence, a refusal, or a client that went silent?"""
    runs = [run for group in groups for run in group.runs]
    return any(is_attacked(run) or is_defended(run) or _client_issues(run) for run in runs)


def is_attacked(run: Run) -> bool:
    return run.config.attack.strip() not in ("", "none")


def is_defended(run: Run) -> bool:
    """Does a robust aggregator replace the mean?"""
    return any(word.partition("(")[0].strip() in ROBUST for word in run.config.method.split("+"))


def count_holders(label_counts: Sequence[Sequence[int]]) -> np.ndarray:
    """How many clients hold a class, counted so that small shares count little: 1 / sum_k (share of
    the class' rows at client k)^2. [K][C] -> [C]

    Half of the first class lies with each of two clients, nearly all of the second with one:

    >>> count_holders([[5, 9], [5, 1]]).round(2).tolist()
    [2.0, 1.22]
    """
    counts = np.asarray(label_counts, dtype=float)
    total = counts.sum(axis=0)
    squares = np.square(counts / np.where(total > 0, total, 1.0)).sum(axis=0)
    return np.asarray(np.where(squares > 0, 1 / np.where(squares > 0, squares, 1.0), 0.0))


def rare_classes(run: Run) -> np.ndarray:
    """The third of the classes, at least one, that the fewest clients hold; nothing where label
    counts were not written down. -> class numbers
    """
    held = run.metadata["label_counts"]
    if not held or not held[0]:
        return np.zeros(0, dtype=np.int64)
    holders = count_holders(held)
    there = np.flatnonzero(holders > 0)
    return np.sort(
        there[np.argsort(holders[there], kind="stable")][: max(1, round(RARE * len(there)))]
    )


@dataclass(frozen=True)
class RobustnessRow:
    """How a method stands under an attack, or without one; means over seeds, shares between 0
    and 1.
    """

    label: str
    attack: str
    accuracy: float | None
    rare: float | None  # accuracy on the rare classes
    forgetting: float | None  # what a class loses from one recorded round to the next
    rare_forgetting: float | None  # the same of rare classes
    success: float | None  # how often the attack gets its way
    rejected: int
    no_response: int  # times a client did not answer at all


def robustness_row(group: Group) -> RobustnessRow:
    runs = [run for run in group.runs if run.metrics]
    parts = [_class_accuracies(run) for run in runs]
    return RobustnessRow(
        label=group.label,
        attack=", ".join(sorted({run.config.attack or "none" for run in runs})),
        accuracy=mean_of(last_value(run) for run in runs),
        rare=mean_of(part[0] for part in parts),
        forgetting=mean_of(part[1] for part in parts),
        rare_forgetting=mean_of(part[2] for part in parts),
        success=mean_of(last_value(run, "attack_success") for run in runs),
        rejected=sum(
            len(mishap.rounds)
            for run in runs
            for mishap in _client_issues(run)
            if mishap.code != SILENT
        ),
        no_response=sum(
            len(mishap.rounds)
            for run in runs
            for mishap in _client_issues(run)
            if mishap.code == SILENT
        ),
    )


def _class_accuracies(run: Run) -> tuple[float | None, float | None, float | None]:
    """-> accuracy on rare classes at the end, forgetting over all classes, and over the rare
    ones
    """
    rounds, shares = class_curve(run)
    rare = rare_classes(run)
    if not len(rounds) or not len(rare) or shares.shape[1] <= rare.max():
        return None, None, None
    drops = class_drops(shares)
    return _number(shares[-1, rare]), _number(drops), _number(drops[:, rare])


def _number(values: np.ndarray) -> float | None:
    mean = float(nan_mean(values.reshape(-1), axis=0)) if values.size else float("nan")
    return None if np.isnan(mean) else mean


SILENT = "no answer"


@dataclass(frozen=True)
class ClientIssue:
    """A client that was refused for a reason, or did not answer."""

    client: int
    code: str
    rounds: tuple[int, ...]
    reason: str  # of the last time
    attacker: bool


def _client_issues(run: Run) -> list[ClientIssue]:
    """By client and code; a round's lines, one a split, repeat its refusals: they count once."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for line in run.metrics:
        for reply in line.get("rejected") or []:
            found.setdefault((reply["client"], reply["code"]), {})[line["round"]] = str(
                reply.get("reason", "")
            )
        for client in line.get("no_response") or []:
            found.setdefault((client, SILENT), {})[line["round"]] = (
                "it was asked and did not answer in time"
            )
    attackers = set(str(run.metadata.get("attackers", "")).split())
    return [
        ClientIssue(client, code, tuple(sorted(when)), when[max(when)], str(client) in attackers)
        for (client, code), when in sorted(
            found.items(), key=lambda entry: (-len(entry[1]), entry[0])
        )
    ]


def tabulate(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The section's tables: what attack and defence do, and who was refused. Each: caption,
    headings, rows of texts
    """
    if not has_attacks(groups):
        return []
    stands = [robustness_row(group) for group in groups]
    headings = [
        "Method",
        "Attack",
        "Accuracy, %",
        "Rare classes, %",
        "Forgotten a round, points",
        "Of rare classes, points",
        "Attack succeeds, %",
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
        for s in stands
    ]
    tables = [
        {
            "caption": "Under attack and under defence: rare classes are the third that the fewest"
            " clients hold",
            "headings": headings,
            "rows": rows,
        }
    ]
    listed = [
        (group, run, mishap)
        for group in groups
        for run in group.runs
        for mishap in _client_issues(run)
    ]
    if listed:
        more = f" (the first {MAX_LISTED} of {len(listed)})" if len(listed) > MAX_LISTED else ""
        tables.append(
            {
                "caption": f"Who was refused, and why{more}: none of it touched a model",
                "headings": ["Method", "Seed", "Client", "Code", "Times", "Rounds", "Reason"],
                "rows": [
                    _describe_issue(group, run, mishap)
                    for group, run, mishap in listed[:MAX_LISTED]
                ],
            }
        )
    return tables


def _describe_issue(group: Group, run: Run, mishap: ClientIssue) -> list[str]:
    first, last = mishap.rounds[0], mishap.rounds[-1]
    who = (
        f"{mishap.client} (attacker)"
        if mishap.attacker
        else str(mishap.client)
        if mishap.client >= 0
        else "did not say"
    )
    when = str(first) if first == last else f"{first} to {last}"
    return [
        group.label,
        str(run.config.seed),
        who,
        mishap.code,
        str(len(mishap.rounds)),
        when,
        mishap.reason or MISSING,
    ]


def draw_rare_classes(groups: Sequence[Group]) -> Figure | None:
    """Accuracy per class at the end, from the class that fewest clients hold to the one that
    most do; only under attack or defence.
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
        ends = [
            shares[-1]
            for rounds, shares in (class_curve(run) for run in group.runs)
            if len(rounds) and shares.shape[1] == len(order)
        ]
        if not ends:
            continue
        shares = nan_mean(np.array(ends), axis=0)[order]
        names = [
            as_text(name)
            for name in np.array(name_classes(class_names_of(group), len(order)))[order]
        ]
        label = as_text(group.label)
        traces.append(
            go.Scatter(
                name=label, x=names, y=rounded(shares), mode="markers", marker=marker_style(index),
                hovertemplate="%{x}: %{y:.1%}<extra>" + label + "</extra>", meta={"columns": ["method", "class", "accuracy"]},
            )
        )  # fmt: skip
        details.append(
            f"{group.label} {shares[0]:.0%} on {names[0]}, {shares[-1]:.0%} on {names[-1]}"
        )
    if not traces:
        return None
    shape = layout(
        360, [trace.name for trace in traces], xaxis=axis("class, from the one that fewest clients hold", type="category"),
        yaxis=percent_axis("accuracy", range=[-0.02, 1.02]), scattermode="group", scattergap=0.35,
    )  # fmt: skip
    return Figure(
        name="rare-classes",
        title="What it costs the classes that few clients hold",
        plot=go.Figure(traces, shape),
        caption="Each dot is the accuracy on a class after the last recorded round. Where a"
        " defence lies below the others at the left, it took the clients"
        " that hold these classes for attackers.",
        alt="Dot plot of the accuracy of every class, ordered by how many clients hold it."
        f" {'; '.join(details)}.",
    )


def draw_success(groups: Sequence[Group]) -> Figure | None:
    """How often the attack gets its way, over rounds; where an attack has a goal that can be
    measured.
    """
    traces: list[Any] = []
    names, when, details = [], [], []
    for index, group in enumerate(groups):
        rounds, means, spread = mean_curve(group, partial(metric_curve, value="attack_success"))
        if rounds:
            names.append(as_text(group.label))
            when += rounds
            traces += draw_line(
                names[-1], index, rounds, means, spread, columns=("method", "round", "success")
            )
            details.append(f"{group.label} {means[-1]:.0%}")
    if not traces:
        return None
    return Figure(
        name="attack-success",
        title="How often the attack gets its way",
        plot=go.Figure(
            traces,
            layout(
                320,
                names,
                xaxis=round_axis(when),
                yaxis=percent_axis("success"),
                hovermode="x unified",
                **mark_steps(groups),
            ),
        ),
        caption="Lower is better: the share of test rows made for the attack, such as images with"
        " its mark, that get the label it wants.",
        alt=f"Line chart of the attack's success over rounds. At the end: {'; '.join(details)}.",
    )
