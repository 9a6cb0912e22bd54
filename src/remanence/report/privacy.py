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
    f" more is revealed. Warning: {NOT_PRIVATE}."
)


@dataclass(frozen=True)
class PrivacyRow:
    """One privacy guarantee of one method."""

    label: str
    unit: str
    epsilon: str  # after the last recorded round, the largest over seeds
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
    spent = [found for run in runs if (found := _last(run, name)) is not None]
    budget = guarantee["budget"]
    return PrivacyRow(
        label=group.label,
        unit=unit,
        epsilon=f"{max(number for number, _ in spent):.2f} after round"
        f" {max(round for _, round in spent)}"
        if spent
        else "unknown",
        budget=f"{budget:g}" if budget else "none",
        delta=f"{guarantee['delta']:g}",
        basis=str(guarantee["basis"]),
    )


def _last(run: Run, name: str) -> tuple[float, int] | None:
    """The last epsilon of a run that was recorded, and its round."""
    spent = [(line[name], line["round"]) for line in run.metrics if line.get(name) is not None]
    return spent[-1] if spent else None
