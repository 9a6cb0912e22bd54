"""`remanence diagnose`: what was forgotten, in which phase, by which classes and clients, whether
it exceeds the noise between seeds, and which methods may help.

- `findings`: findings about a method and about methods compared; `clients`: those about clients.
- `recommendations`: which methods and settings may help against a finding.
- `wording`: the dataclass of a finding, and how noise is described.

The numbers come from `metrics`, phrases that the report shares from `reports`. May import
`reports`, `metrics`, `results` and packages below. Begin with `diagnose`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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
from remanence.reports.phrases import list_warnings
from remanence.results.run import Comparison, Run


@dataclass(frozen=True)
class Diagnosis:
    """The findings about one method or, without a label, about all methods compared."""

    label: str
    findings: tuple[Finding, ...] = ()


class Diagnoses(list[Diagnosis]):
    """Diagnoses of several methods, shown as text.

    Args:
        found: The diagnoses.
        warnings: Why numbers of the runs are not what they seem.
    """

    def __init__(self, found: Iterable[Diagnosis], warnings: Sequence[str] = ()):
        super().__init__(found)
        self.warnings = list(warnings)

    def __str__(self) -> str:
        warned = "".join(f"Warning: {text}\n" for text in self.warnings)
        return warned + render_text(self).removesuffix("\n")

    __repr__ = __str__


def diagnose(results: Sequence[Run | Comparison]) -> Diagnoses:
    """Diagnose runs and comparisons.

    Args:
        results: The runs and comparisons.

    Returns:
        A diagnosis for every method and, if there are several, one that compares them.
    """
    everything = group_runs(results)
    groups = select_by_validation(everything)
    found = [_examine(group) for group in groups]
    found += [Diagnosis("", (compare(groups),))] if len(groups) > 1 else []
    return Diagnoses(found, list_warnings(everything))


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
    """Format diagnoses for a terminal. Characters that are not printable are replaced, so that
    names cannot control the terminal.
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
        recommendations = dict.fromkeys(
            recommendation
            for finding in diagnosis.findings
            for recommendation in finding.recommendations
        )
        if recommendations:
            lines += ["", "  What may help:"]
        for recommendation in recommendations:
            lines += textwrap.wrap(
                f"{recommendation.action} – {recommendation.reason}",
                width,
                initial_indent="    ",
                subsequent_indent="      ",
            )
    return (
        "\n".join(
            "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
            for line in lines
        ).strip()
        + "\n"
    )
