"""The section "Privacy" of a report: what each guarantee protects, how much of the privacy budget
is spent, and the mechanism behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remanence.metrics.groups import Group
from remanence.privacy.guarantees import NOT_PRIVATE
from remanence.results.run import Run

UNITS = {
    "client": ("any one client", "epsilon"),
    "example": ("any one example", "epsilon_example"),
    "label_counts": ("any one example, in the label counts alone", "epsilon_label_counts"),
}
EXPLANATION = (
    "A smaller epsilon reveals less about the protected unit; delta bounds the probability that"
    " more is revealed. The first epsilon compares with a federation in which the unit contributes"
    " nothing (it is added or removed), the second with one in which it is another one (replaced);"
    f" papers report one or the other. Warning: {NOT_PRIVATE}."
)


@dataclass(frozen=True)
class PrivacyRow:
    """One privacy guarantee of one method."""

    label: str
    unit: str
    epsilon: str  # after the last recorded round, the largest over seeds
    replaced: str  # the same for replacing one
    budget: str
    delta: str
    basis: str


def list_guarantees(groups: Sequence[Group]) -> list[PrivacyRow]:
    """A row for every different guarantee; empty without guarantees."""
    rows: dict[tuple[str, str, str], tuple[Group, list[Run], dict[str, object]]] = {}
    for group in groups:
        for run in group.runs:
            for guarantee in run.metadata.get("guarantees", []):
                key = (group.label, str(guarantee["unit"]), str(guarantee["basis"]))
                rows.setdefault(key, (group, [], guarantee))[1].append(run)
    return [_describe_guarantee(group, runs, guarantee) for group, runs, guarantee in rows.values()]


def _describe_guarantee(
    group: Group, runs: Sequence[Run], guarantee: dict[str, object]
) -> PrivacyRow:
    unit, name = UNITS.get(str(guarantee["unit"]), (str(guarantee["unit"]), "epsilon"))
    budget = guarantee["budget"]
    return PrivacyRow(
        label=group.label,
        unit=unit,
        epsilon=_describe_spent(runs, name),
        replaced=_describe_spent(runs, f"{name}_replace"),
        budget=f"{budget:g}" if budget else "none",
        delta=f"{guarantee['delta']:g}",
        basis=str(guarantee["basis"]),
    )


def _describe_spent(runs: Sequence[Run], name: str) -> str:
    spent = [found for run in runs if (found := _last(run, name)) is not None]
    if not spent:
        return "unknown"
    largest, last = max(number for number, _ in spent), max(round for _, round in spent)
    return f"{largest:.2f} after round {last}"


def _last(run: Run, name: str) -> tuple[float, int] | None:
    """The last epsilon of a run that was recorded, and its round."""
    spent = [(line[name], line["round"]) for line in run.metrics if line.get(name) is not None]
    return spent[-1] if spent else None
