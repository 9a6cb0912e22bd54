"""Attacks and defenses in numbers: accuracy and forgetting of the classes that few clients hold,
and which clients were rejected.

A robust aggregator discards unusual replies. A client that alone holds a class is unusual, so the
cost of a defense shows in these classes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remanence.aggregators.robust import ROBUST
from remanence.metrics.accuracy_tables import nan_mean
from remanence.metrics.forgetting import class_drops
from remanence.metrics.groups import Group, class_curve, last_value, mean_of
from remanence.results.run import Run

RARE = 1 / 3  # share of the classes: those that the fewest clients hold
NO_RESPONSE = "no response"


def has_attacks(groups: Sequence[Group]) -> bool:
    """Is there an attack, a robust aggregator, a rejected reply, or a client without response?"""
    runs = [run for group in groups for run in group.runs]
    return any(is_attacked(run) or is_defended(run) or client_issues(run) for run in runs)


def is_attacked(run: Run) -> bool:
    """Was the run started with an attack?"""
    return run.config.attack.strip() not in ("", "none")


def is_defended(run: Run) -> bool:
    """Does a robust aggregator replace the mean?"""
    return any(word.partition("(")[0].strip() in ROBUST for word in run.config.method.split("+"))


def count_holders(label_counts: Sequence[Sequence[int]]) -> np.ndarray:
    """The effective number of clients that hold a class: 1 / sum_k (share of the class' examples
    at client k)^2, so that small shares count little. [K][C] -> [C]

    Each of two clients holds half of the first class, one holds nearly all of the second:

    >>> count_holders([[5, 9], [5, 1]]).round(2).tolist()
    [2.0, 1.22]
    """
    counts = np.asarray(label_counts, dtype=float)
    total = counts.sum(axis=0)
    squares = np.square(counts / np.where(total > 0, total, 1.0)).sum(axis=0)
    return np.asarray(np.where(squares > 0, 1 / np.where(squares > 0, squares, 1.0), 0.0))


def rare_classes(run: Run) -> np.ndarray:
    """The third of the classes, at least one, that the fewest clients hold.

    Returns:
        Class numbers; empty where label counts were not recorded.
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
    """A method under an attack, or without one: means over seeds, shares between 0 and 1."""

    label: str
    attack: str
    accuracy: float | None
    rare: float | None  # accuracy on the rare classes
    forgetting: float | None  # what a class loses from one recorded round to the next
    rare_forgetting: float | None  # the same of rare classes
    success: float | None  # share of examples on which the attack succeeds
    rejected: int
    no_response: int  # times a client did not respond


def robustness_row(group: Group) -> RobustnessRow:
    """The numbers of one method."""
    runs = [run for run in group.runs if run.metrics]
    parts = [_class_accuracies(run) for run in runs]
    issues = [issue for run in runs for issue in client_issues(run)]
    return RobustnessRow(
        label=group.label,
        attack=", ".join(sorted({run.config.attack or "none" for run in runs})),
        accuracy=mean_of(last_value(run) for run in runs),
        rare=mean_of(part[0] for part in parts),
        forgetting=mean_of(part[1] for part in parts),
        rare_forgetting=mean_of(part[2] for part in parts),
        success=mean_of(last_value(run, "attack_success") for run in runs),
        rejected=sum(len(issue.rounds) for issue in issues if issue.code != NO_RESPONSE),
        no_response=sum(len(issue.rounds) for issue in issues if issue.code == NO_RESPONSE),
    )


def _class_accuracies(run: Run) -> tuple[float | None, float | None, float | None]:
    """Accuracy on rare classes at the end, forgetting of all classes, forgetting of rare ones."""
    rounds, accuracies = class_curve(run)
    rare = rare_classes(run)
    if not len(rounds) or not len(rare) or accuracies.shape[1] <= rare.max():
        return None, None, None
    drops = class_drops(accuracies)
    return _mean(accuracies[-1, rare]), _mean(drops), _mean(drops[:, rare])


def _mean(values: np.ndarray) -> float | None:
    mean = float(nan_mean(values.reshape(-1), axis=0)) if values.size else float("nan")
    return None if np.isnan(mean) else mean


@dataclass(frozen=True)
class ClientIssue:
    """A client whose replies were rejected, or that did not respond."""

    client: int
    code: str
    rounds: tuple[int, ...]
    reason: str  # of the last time
    attacker: bool


def client_issues(run: Run) -> list[ClientIssue]:
    """Rejected and missing replies by client and code.

    The lines of a round, one a split, repeat its rejections: they count once.
    """
    found: dict[tuple[int, str], dict[int, str]] = {}
    for line in run.metrics:
        for reply in line.get("rejected") or []:
            found.setdefault((reply["client"], reply["code"]), {})[line["round"]] = str(
                reply.get("reason", "")
            )
        for client in line.get("no_response") or []:
            found.setdefault((client, NO_RESPONSE), {})[line["round"]] = "did not respond in time"
    attackers = set(str(run.metadata.get("attackers", "")).split())
    return [
        ClientIssue(client, code, tuple(sorted(when)), when[max(when)], str(client) in attackers)
        for (client, code), when in sorted(
            found.items(), key=lambda entry: (-len(entry[1]), entry[0])
        )
    ]
