"""`remanence diagnose`: what was forgotten, in which phase, which classes and clients, whether
it is more than noise, and which cures fit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from remanence.diagnosis.clients import describe_clients, describe_drift, describe_examples
from remanence.diagnosis.findings import (
    compare,
    describe_forgetting,
    describe_warnings,
    find_phases,
)
from remanence.diagnosis.wording import Finding
from remanence.metrics.groups import Group, group_runs, select_by_validation
from remanence.metrics.summary_rows import make_row
from remanence.results.run import Comparison, Run


@dataclass(frozen=True)
class Diagnosis:
    """What is found about one method, or, without a label, about methods against each other."""

    label: str
    findings: tuple[Finding, ...] = ()


def diagnose(results: Sequence[Run | Comparison]) -> list[Diagnosis]:
    """A diagnosis for every method, then one of all against each other where there are several."""
    groups = select_by_validation(group_runs(results))
    found = [_examine(group) for group in groups]
    return [*found, Diagnosis("", (compare(groups),))] if len(groups) > 1 else found


def _examine(group: Group) -> Diagnosis:
    row = make_row(group)
    if row.accuracy is None:
        return Diagnosis(
            group.label,
            (
                Finding(
                    "nothing yet",
                    "No round has been evaluated yet: there is nothing to diagnose.",
                    {},
                ),
            ),
        )
    found = [
        describe_forgetting(group, row),
        *find_phases(group),
        *describe_clients(group),
        *describe_examples(group),
    ]
    found += [*describe_drift(group, row), *describe_warnings(row)]
    return Diagnosis(group.label, tuple(found))


def render_text(diagnoses: Sequence[Diagnosis], width: int = 100) -> str:
    """Diagnoses for a terminal. A name cannot steer the terminal: what is not printable is
    shown as a mark.
    """
    lines: list[str] = []
    for diagnosis in diagnoses:
        lines += ["", diagnosis.label or "All methods", ""]
        for finding in diagnosis.findings:
            lines += textwrap.wrap(
                f"{finding.topic}: {finding.sentence}",
                width,
                initial_indent="  ",
                subsequent_indent="    ",
            )
        cures = dict.fromkeys(
            cure for finding in diagnosis.findings for cure in finding.recommendations
        )
        if cures:
            lines += ["", "  What fits:"]
        for cure in cures:
            lines += textwrap.wrap(
                f"{cure.action} – {cure.reason}",
                width,
                initial_indent="    ",
                subsequent_indent="      ",
            )
    return (
        "\n".join(
            "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line)
            for line in lines
        ).strip()
        + "\n"
    )
