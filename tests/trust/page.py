"""Writes docs/reliability.md from the trials of a whole run of the suite.

python tests/trust/page.py FOLDER docs/reliability.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script, from anywhere

from faults import FAULTS, Fault

OPENING = """\
# Reliability: the faults that were tested

This page lists every fault that the tests cause, the expected result, the observed result and the number of trials. `make test-all` writes it from one whole
run of `tests/trust`, and only if all trials ended as expected: do not edit it. `make test` runs a sample of each. Attacks by hostile clients and defenses:
[hostile.md](hostile.md). What is guaranteed and what is not: [SECURITY.md](../SECURITY.md).

Runs are killed at randomly chosen lines of our own code, the same number in every phase. Fuzzed inputs are random bytes, and valid files with flipped bits,
cuts, splices and forged numbers. All random choices are seeded, so that a failure can be reproduced.
"""


def read_trials(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(text)
        for path in sorted(folder.glob("*.jsonl"))
        for text in path.read_text(encoding="utf-8").splitlines()
    ]


def write_page(trials: Sequence[dict[str, Any]]) -> str:
    """The page; exits with an error if a fault has no trial."""
    lines, theme = [OPENING], ""
    for fault in FAULTS:
        own_trials = [trial for trial in trials if trial["fault"] == fault.name]
        if not own_trials:
            raise SystemExit(f"no trial of {fault.name!r}: the page cannot be written")
        if fault.theme != theme:
            theme = fault.theme
            lines.append(
                f"\n## {theme}\n\n| fault | expected | observed | engines | trials"
                " |\n|---|---|---|---|--:|"
            )
        lines.append(_table_row(fault, own_trials))
    total = sum(trial["times"] for trial in trials)
    return "\n".join(lines) + f"\n\n{total:,} trials of {len(FAULTS)} faults in all.\n"


def _table_row(fault: Fault, trials: Sequence[dict[str, Any]]) -> str:
    done = [trial for trial in trials if trial["times"]] or list(trials)
    happened = "; ".join(dict.fromkeys(trial["happened"] for trial in done))
    engines = (
        ", ".join(dict.fromkeys(sorted(trial["engine"] for trial in done if trial["engine"])))
        or "–"
    )
    return (
        f"| {fault.name} | {fault.expected} | {happened} | {engines} |"
        f" {sum(trial['times'] for trial in done):,} |"
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(write_page(read_trials(source)), encoding="utf-8")
