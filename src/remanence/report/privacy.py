"""The section "Privacy" of a report: what was promised to whom, how much of it is spent, and
what that rests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remanence.metrics.groups import Group
from remanence.privacy.accountant import NOT_PRIVATE
from remanence.results.run import Run

OF_WHOM = {
    "client": ("any one client", "epsilon"),
    "example": ("any one example", "epsilon_example"),
    "label_counts": ("any one example, in the label counts alone", "epsilon_label_counts"),
}
WORDING = (
    "A smaller epsilon tells less about any one of them; delta bounds the chance that more is"
    f" told. Beware: {NOT_PRIVATE}."
)


@dataclass(frozen=True)
class PrivacyRow:
    """One promise of one method."""

    label: str
    whom: str
    epsilon: str  # after the last recorded round, the largest over seeds
    budget: str
    delta: str
    basis: str


def list_guarantees(groups: Sequence[Group]) -> list[PrivacyRow]:
    """A row for every promise that differs; none where nobody promised anything."""
    rows: dict[tuple[str, str, str], tuple[Group, list[Run], dict[str, object]]] = {}
    for group in groups:
        for run in group.runs:
            for promise in run.metadata.get("promises", []):
                key = (group.label, str(promise["whom"]), str(promise["basis"]))
                rows.setdefault(key, (group, [], promise))[1].append(run)
    return [_describe_guarantee(group, runs, promise) for group, runs, promise in rows.values()]


def _describe_guarantee(
    group: Group, runs: Sequence[Run], promise: dict[str, object]
) -> PrivacyRow:
    whom, name = OF_WHOM.get(str(promise["whom"]), (str(promise["whom"]), "epsilon"))
    spent = [found for run in runs if (found := _last(run, name)) is not None]
    budget = promise["budget"]
    return PrivacyRow(
        label=group.label,
        whom=whom,
        epsilon=f"{max(number for number, _ in spent):.2f} after round"
        f" {max(round for _, round in spent)}"
        if spent
        else "not known",
        budget=f"{budget:g}" if budget else "none",
        delta=f"{promise['delta']:g}",
        basis=str(promise["basis"]),
    )


def _last(run: Run, name: str) -> tuple[float, int] | None:
    """The last epsilon that a run wrote down, and in which round."""
    told = [(line[name], line["round"]) for line in run.metrics if line.get(name) is not None]
    return told[-1] if told else None
